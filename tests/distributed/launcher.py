"""``python -m flatout.launch.local_launcher`` as a script, which the warm process can become."""

import sys

from flatout.launch.local_launcher import main

sys.exit(main())
