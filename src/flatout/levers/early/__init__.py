"""Copy values to the host before the script reads them.

``copies.py`` makes the copies, ``reads.py`` learns which values are read, and where the script keeps them.
"""
