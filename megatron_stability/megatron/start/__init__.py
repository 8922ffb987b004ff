"""From a command line to ranks that train."""
