"""What a loader reports while it runs: the delivery ledger, metrics, and the reason for stalls."""
