import sys, tempfile, time, json, os
from pathlib import Path
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
os.environ["OMP_NUM_THREADS"] = "1"
from conftest import Flatout
from lives import live
from traps import TRAPS
out = open(sys.argv[1], "a", buffering=1)
names = [n for n in TRAPS if len(sys.argv) < 3 or any(a == n or (a.endswith("*") and n.startswith(a[:-1])) for a in sys.argv[2:])]
for name in names:
    with tempfile.TemporaryDirectory() as t:
        f = Path(t) / "work"; f.mkdir()
        fl = Flatout(f)
        b = time.time()
        try:
            r = live(fl, TRAPS[name])
            print(f"{name:40} {r.verdict:9} after {r.after} {time.time()-b:.1f}s  {r.why}", file=out)
        except BaseException as e:
            print(f"{name:40} HARNESS {type(e).__name__} {str(e)[-900:]}", file=out)
            if isinstance(e, KeyboardInterrupt): raise
        fl.close()
