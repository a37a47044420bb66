"""Room 1: enters the script. Importing this room patches nothing; only the ledger patches, and only when asked."""
