"""Attaches to the script. Importing this package patches nothing; only the ledger patches, on request."""
