"""The levers: one optimisation per file, and the table that lists them in the order in which they act.

Runs in: the user's program (applies, apply), flatout.Loop, and the flatout command (the table, environment).
Imports: schema, job, data, distributed, kernels.
Start with: schema/lever.py (Lever), then tf32.py. To add a lever, add one file, and two lines here.
"""

from flatout.levers.allocator import LEVER as allocator
from flatout.levers.attention import LEVER as attention
from flatout.levers.autocast import LEVER as autocast
from flatout.levers.batch_size import LEVER as batch_size
from flatout.levers.batched_transforms import LEVER as batched_transforms
from flatout.levers.cached_prefix import LEVER as cached_prefix
from flatout.levers.channels_last import LEVER as channels_last
from flatout.levers.comm_compression import LEVER as comm_compression
from flatout.levers.compile import LEVER as compile_
from flatout.levers.cudnn_benchmark import LEVER as cudnn_benchmark
from flatout.levers.data_parallel import LEVER as data_parallel
from flatout.levers.ddp_flags import LEVER as ddp_flags
from flatout.levers.debug_off import LEVER as debug_off
from flatout.levers.device_prefetch import LEVER as device_prefetch
from flatout.levers.early_values import LEVER as early_values
from flatout.levers.fused_ops import LEVER as fused_ops
from flatout.levers.fused_optimizer import LEVER as fused_optimizer
from flatout.levers.gc_pause import LEVER as gc_pause
from flatout.levers.gradient_buckets import LEVER as gradient_buckets
from flatout.levers.graphs import LEVER as graphs
from flatout.levers.inplace import LEVER as inplace
from flatout.levers.loader import LEVER as loader
from flatout.levers.local_sgd import LEVER as local_sgd
from flatout.levers.malloc import LEVER as malloc
from flatout.levers.memory_budget import LEVER as memory_budget
from flatout.levers.offload import LEVER as offload
from flatout.levers.optimizer_state import LEVER as optimizer_state
from flatout.levers.recompute import LEVER as recompute
from flatout.levers.reduced_precision import LEVER as reduced_precision
from flatout.levers.resident_data import LEVER as resident_data
from flatout.levers.sharding import LEVER as sharding
from flatout.levers.tf32 import LEVER as tf32
from flatout.levers.threads import LEVER as threads
from flatout.schema.lever import Lever

TABLE: tuple[Lever, ...] = (
    allocator,
    malloc,
    threads,
    gc_pause,
    debug_off,
    batch_size,
    loader,
    cached_prefix,
    batched_transforms,
    resident_data,
    device_prefetch,
    data_parallel,
    sharding,
    local_sgd,
    ddp_flags,
    comm_compression,
    gradient_buckets,
    tf32,
    cudnn_benchmark,
    reduced_precision,
    channels_last,
    autocast,
    attention,
    fused_ops,
    compile_,
    memory_budget,
    inplace,
    recompute,
    offload,
    fused_optimizer,
    optimizer_state,
    graphs,
    early_values,
)
