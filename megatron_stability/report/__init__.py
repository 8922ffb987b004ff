"""The pages that people look at: a run from its ledger, as HTML."""
