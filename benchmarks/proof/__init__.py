"""Published small-scale instabilities, rerun through the product: what a remedy does, and where it does nothing."""
