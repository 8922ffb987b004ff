"""`audit-data`: every document's scores, what is wrong with the files, and a list of what to leave out."""
