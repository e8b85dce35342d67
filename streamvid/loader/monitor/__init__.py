"""Reports on a running loader: the delivery ledger, metrics, and the reasons for stalls."""
