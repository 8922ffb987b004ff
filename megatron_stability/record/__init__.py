"""What remains: the ledger, sinks, incident bundles, the report."""
