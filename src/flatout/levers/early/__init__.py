"""Values that are on the host before the script reads them: their copies (``copies.py``), which ones are read (``reads.py``), where the script keeps them
(``names.py``).
"""
