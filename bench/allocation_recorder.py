"""Runs a script as ``__main__`` and records the peak memory of torch's allocator. Independent of flatout.

    python allocation_recorder.py OUT CYCLES SCRIPT [ARGUMENT...]

It records the allocator's events from right after the import of torch; a running sum gives all live bytes. A
cycle ends with the optimizer that steps last in the first round of all optimizers. The peak is taken over
CYCLES cycles after the first two; then the process ends. On CUDA it reads the allocator's own statistics
instead.
"""

import json
import os
import runpy
import sys


def main():
    if len(sys.argv) < 4 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    out, cycles, rest = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    import torch
    from torch.optim import optimizer as optimizers

    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    profile.start()
    order, steps = [], 0

    def stepped(optimizer, args, kwargs):
        nonlocal steps
        if id(optimizer) not in order:
            order.append(id(optimizer))
        elif id(optimizer) == order[-1]:
            steps += 1
            with torch.profiler.record_function(f"cycle {steps}"):
                pass
            if steps == 2 and torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            if steps == 2 + cycles:
                write(torch, profile, out, steps)
                os._exit(0)

    optimizers.register_optimizer_step_post_hook(stepped)
    sys.argv = rest
    sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
    runpy.run_path(rest[0], run_name="__main__")


def write(torch, profile, out, steps):
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
    else:
        profile.stop()
        events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        total, peak, counting = 0, 0, False
        for event in events:
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total) if counting else 0
            elif event.name() in ("cycle 2", f"cycle {steps}"):
                counting = event.name() == "cycle 2"
                if not counting:
                    break
                peak = total
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"peak_bytes": peak, "cycles": steps - 2}, file)


if __name__ == "__main__":
    main()
