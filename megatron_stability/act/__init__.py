"""What a Decision does: the sample ledger, learning-rate scale, rewind, halt."""
