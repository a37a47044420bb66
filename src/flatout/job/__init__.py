"""What the processes of one job share: its folder, environment variables, claims, heartbeats.

Also what is done to text and files of others: trust, masking of secrets, removal of control characters.

Runs in: every process.
Imports: schema.
Start with: folder.py (JobFolder), claims.py, heartbeat.py.
"""
