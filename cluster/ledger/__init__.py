"""The ledger: what must be known about requests after the process that served them is gone. SQL, by URL."""
