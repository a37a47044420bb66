"""What-if bounds, one per file: how fast the step would be without one cost.

They change the maths on purpose, only inside a trial.

Each is a Lever that is switched on and off between blocks of steps of the running program. None is ever part
of a Plan. The table is in display order.
"""

from flatout.diagnose.what_ifs.copies import LEVER as copies
from flatout.diagnose.what_ifs.garbage import LEVER as garbage
from flatout.diagnose.what_ifs.loader import LEVER as loader
from flatout.diagnose.what_ifs.messages import LEVER as messages
from flatout.diagnose.what_ifs.optimizer import LEVER as optimizer
from flatout.diagnose.what_ifs.syncs import LEVER as syncs
from flatout.diagnose.what_ifs.threads import FEWER, MORE
from flatout.schema.lever import Lever

TABLE: tuple[Lever, ...] = (loader, copies, optimizer, syncs, messages, garbage, FEWER, MORE)
