"""Server-side tools: calling them over HTTP, and the run of one request through ledger and tools."""
