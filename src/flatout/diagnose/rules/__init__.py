"""The table of all rules, in the order of their codes. To add a rule, add one file and one line here.

FL0xx rules report wrong results, FL1xx wasted time, FL2xx wasted memory and FL3xx fragile code.
In each range, codes from xx50 on need a profile of the running program.
"""

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.accumulation_without_no_sync import RULE as accumulation_without_no_sync
from flatout.diagnose.rules.average_in_small_operations import RULE as average_in_small_operations
from flatout.diagnose.rules.average_over_full_batches import RULE as average_over_full_batches
from flatout.diagnose.rules.backward_under_autocast import RULE as backward_under_autocast
from flatout.diagnose.rules.bce_under_autocast import RULE as bce_under_autocast
from flatout.diagnose.rules.best_weights_not_copied import RULE as best_weights_not_copied
from flatout.diagnose.rules.bias_before_batchnorm import RULE as bias_before_batchnorm
from flatout.diagnose.rules.call_without_parentheses import RULE as call_without_parentheses
from flatout.diagnose.rules.checkpoint_without_optimizer import RULE as checkpoint_without_optimizer
from flatout.diagnose.rules.clip_in_the_wrong_place import RULE as clip_in_the_wrong_place
from flatout.diagnose.rules.clip_without_unscale import RULE as clip_without_unscale
from flatout.diagnose.rules.collecting_garbage import RULE as collecting_garbage
from flatout.diagnose.rules.context_not_entered import RULE as context_thrown_away
from flatout.diagnose.rules.created_on_cpu_then_moved import RULE as made_on_host_then_moved
from flatout.diagnose.rules.data_parallel_loss import RULE as data_parallel_loss
from flatout.diagnose.rules.data_parallel_used import RULE as data_parallel_used
from flatout.diagnose.rules.data_wait import RULE as data_wait
from flatout.diagnose.rules.debugging_left_on import RULE as debugging_left_on
from flatout.diagnose.rules.deterministic_with_benchmark import RULE as deterministic_with_benchmark
from flatout.diagnose.rules.double_precision import RULE as double_precision
from flatout.diagnose.rules.dropout_always_on import RULE as dropout_always_on
from flatout.diagnose.rules.empty_cache_every_step import RULE as empty_cache_every_step
from flatout.diagnose.rules.eval_mode_missing import RULE as eval_mode_missing
from flatout.diagnose.rules.eval_without_no_grad import RULE as eval_without_no_grad
from flatout.diagnose.rules.file_read_for_each_sample import RULE as file_read_for_each_sample
from flatout.diagnose.rules.float16_without_scaler import RULE as float16_without_scaler
from flatout.diagnose.rules.forward_called import RULE as forward_called
from flatout.diagnose.rules.fragmentation import RULE as fragmentation
from flatout.diagnose.rules.freeze_without_effect import RULE as freeze_without_effect
from flatout.diagnose.rules.fresh_iterator_every_step import RULE as fresh_iterator_every_step
from flatout.diagnose.rules.gc_collect_every_step import RULE as gc_collect_every_step
from flatout.diagnose.rules.generator_copied_to_workers import RULE as generator_copied_to_workers
from flatout.diagnose.rules.gradients_zeroed import RULE as gradients_zeroed
from flatout.diagnose.rules.graph_breaks import RULE as graph_breaks
from flatout.diagnose.rules.graph_kept_for_nothing import RULE as graph_kept_for_nothing
from flatout.diagnose.rules.group_for_each_parameter import RULE as group_for_each_parameter
from flatout.diagnose.rules.host_growth import RULE as host_growth
from flatout.diagnose.rules.host_sync_every_step import RULE as host_sync_every_step
from flatout.diagnose.rules.ignore_without_effect import RULE as ignore_without_effect
from flatout.diagnose.rules.iterator_exhausted import RULE as iterator_used_up
from flatout.diagnose.rules.launch_blocking import RULE as launch_blocking
from flatout.diagnose.rules.launch_bound import RULE as launch_bound
from flatout.diagnose.rules.layers_in_a_list import RULE as layers_in_a_list
from flatout.diagnose.rules.layers_made_in_forward import RULE as layers_made_in_forward
from flatout.diagnose.rules.layout_copies import RULE as layout_copies
from flatout.diagnose.rules.leak import RULE as leak
from flatout.diagnose.rules.leftover_gradients import RULE as leftover_gradients
from flatout.diagnose.rules.load_runs_code import RULE as load_runs_code
from flatout.diagnose.rules.load_without_map_location import RULE as load_without_map_location
from flatout.diagnose.rules.loader_cycled import RULE as loader_cycled
from flatout.diagnose.rules.loader_made_in_loop import RULE as loader_made_in_loop
from flatout.diagnose.rules.logging_cost import RULE as logging_cost
from flatout.diagnose.rules.loss_kept_with_graph import RULE as loss_kept_with_graph
from flatout.diagnose.rules.loss_made_a_leaf import RULE as loss_made_a_leaf
from flatout.diagnose.rules.loss_not_divided import RULE as loss_not_divided
from flatout.diagnose.rules.main_guard_missing import RULE as main_guard_missing
from flatout.diagnose.rules.mean_of_token_means import RULE as mean_of_token_means
from flatout.diagnose.rules.memory_filled_for_nothing import RULE as memory_filled_for_nothing
from flatout.diagnose.rules.memory_limit import RULE as memory_limit
from flatout.diagnose.rules.model_moved_every_step import RULE as model_moved_every_step
from flatout.diagnose.rules.nan_check_every_step import RULE as nan_check_every_step
from flatout.diagnose.rules.nll_loss_without_log import RULE as nll_loss_without_log
from flatout.diagnose.rules.no_sync_on_the_step import RULE as no_sync_on_the_step
from flatout.diagnose.rules.non_blocking_without_pinning import RULE as non_blocking_without_pinning
from flatout.diagnose.rules.not_finite import RULE as not_finite
from flatout.diagnose.rules.number_copied_to_device import RULE as number_copied_to_device
from flatout.diagnose.rules.one_sample_at_a_time import RULE as one_sample_at_a_time
from flatout.diagnose.rules.optimizer_made_every_step import RULE as optimizer_made_every_step
from flatout.diagnose.rules.optimizer_not_resumed import RULE as optimizer_not_resumed
from flatout.diagnose.rules.optimizer_of_another_model import RULE as optimizer_of_another_model
from flatout.diagnose.rules.optimizer_share import RULE as optimizer_share
from flatout.diagnose.rules.optimizer_state_lost import RULE as optimizer_state_lost
from flatout.diagnose.rules.parameters_exhausted import RULE as parameters_used_up
from flatout.diagnose.rules.pinned_and_blocking import RULE as pinned_and_blocking
from flatout.diagnose.rules.profiler_step_missing import RULE as profiler_step_missing
from flatout.diagnose.rules.python_between import RULE as python_between
from flatout.diagnose.rules.ranks_see_the_same_data import RULE as ranks_see_the_same_data
from flatout.diagnose.rules.read_in_compiled_code import RULE as read_in_compiled_code
from flatout.diagnose.rules.recompiles import RULE as recompiles
from flatout.diagnose.rules.reduced_twice import RULE as reduced_twice
from flatout.diagnose.rules.result_discarded import RULE as result_thrown_away
from flatout.diagnose.rules.same_draw_on_every_rank import RULE as same_draw_on_every_rank
from flatout.diagnose.rules.same_noise_for_every_sample import RULE as same_noise_for_every_sample
from flatout.diagnose.rules.same_seed_in_workers import RULE as same_seed_in_workers
from flatout.diagnose.rules.saved_by_every_rank import RULE as saved_by_every_rank
from flatout.diagnose.rules.scaler_on_one_side import RULE as scaler_on_one_side
from flatout.diagnose.rules.scaler_update_missing import RULE as scaler_update_missing
from flatout.diagnose.rules.schedule_before_prepare import RULE as schedule_before_prepare
from flatout.diagnose.rules.scheduler_before_optimizer import RULE as scheduler_before_optimizer
from flatout.diagnose.rules.scheduler_remade import RULE as scheduler_remade
from flatout.diagnose.rules.seed_in_the_loop import RULE as seed_in_the_loop
from flatout.diagnose.rules.set_epoch_missing import RULE as set_epoch_missing
from flatout.diagnose.rules.slow_copies import RULE as slow_copies
from flatout.diagnose.rules.slow_fetch import RULE as slow_fetch
from flatout.diagnose.rules.slowing_down import RULE as slowing_down
from flatout.diagnose.rules.softmax_before_cross_entropy import RULE as softmax_before_cross_entropy
from flatout.diagnose.rules.softmax_without_dim import RULE as softmax_without_dim
from flatout.diagnose.rules.step_before_backward import RULE as step_before_backward
from flatout.diagnose.rules.step_off_by_one import RULE as step_off_by_one
from flatout.diagnose.rules.synchronize_every_step import RULE as synchronize_every_step
from flatout.diagnose.rules.tensor_as_key import RULE as tensor_as_key
from flatout.diagnose.rules.tensor_cores_idle import RULE as tensor_cores_idle
from flatout.diagnose.rules.tensor_of_tensor import RULE as tensor_of_tensor
from flatout.diagnose.rules.thread_count import RULE as thread_count
from flatout.diagnose.rules.tiny_batch_norm import RULE as tiny_batch_norm
from flatout.diagnose.rules.tiny_operators import RULE as tiny_operators
from flatout.diagnose.rules.too_many_workers import RULE as too_many_workers
from flatout.diagnose.rules.train_mode_never_set import RULE as train_mode_never_set
from flatout.diagnose.rules.train_mode_not_restored import RULE as train_mode_not_restored
from flatout.diagnose.rules.whole_model_saved import RULE as whole_model_saved
from flatout.diagnose.rules.workers_not_persistent import RULE as workers_not_kept
from flatout.diagnose.rules.zero_grad_before_step import RULE as zero_grad_before_step
from flatout.diagnose.rules.zero_grad_in_window import RULE as zero_grad_in_window
from flatout.diagnose.rules.zero_grad_missing import RULE as zero_grad_missing
from flatout.diagnose.rules.zero_grad_outside import RULE as zero_grad_outside

TABLE: tuple[Rule, ...] = (
    zero_grad_missing,
    zero_grad_outside,
    zero_grad_before_step,
    zero_grad_in_window,
    loss_not_divided,
    step_before_backward,
    clip_in_the_wrong_place,
    clip_without_unscale,
    scaler_on_one_side,
    float16_without_scaler,
    scheduler_before_optimizer,
    set_epoch_missing,
    same_seed_in_workers,
    generator_copied_to_workers,
    eval_mode_missing,
    train_mode_not_restored,
    softmax_before_cross_entropy,
    nll_loss_without_log,
    loss_made_a_leaf,
    optimizer_of_another_model,
    layers_in_a_list,
    layers_made_in_forward,
    dropout_always_on,
    average_over_full_batches,
    profiler_step_missing,
    seed_in_the_loop,
    optimizer_made_every_step,
    call_without_parentheses,
    context_thrown_away,
    result_thrown_away,
    iterator_used_up,
    best_weights_not_copied,
    parameters_used_up,
    freeze_without_effect,
    ranks_see_the_same_data,
    same_noise_for_every_sample,
    no_sync_on_the_step,
    mean_of_token_means,
    same_draw_on_every_rank,
    step_off_by_one,
    optimizer_state_lost,
    leftover_gradients,
    reduced_twice,
    optimizer_not_resumed,
    train_mode_never_set,
    schedule_before_prepare,
    not_finite,
    scheduler_remade,
    host_sync_every_step,
    nan_check_every_step,
    synchronize_every_step,
    empty_cache_every_step,
    gc_collect_every_step,
    loader_made_in_loop,
    model_moved_every_step,
    workers_not_kept,
    pinned_and_blocking,
    non_blocking_without_pinning,
    made_on_host_then_moved,
    debugging_left_on,
    launch_blocking,
    bias_before_batchnorm,
    data_parallel_used,
    accumulation_without_no_sync,
    fresh_iterator_every_step,
    one_sample_at_a_time,
    group_for_each_parameter,
    memory_filled_for_nothing,
    average_in_small_operations,
    number_copied_to_device,
    read_in_compiled_code,
    file_read_for_each_sample,
    data_wait,
    optimizer_share,
    tiny_operators,
    collecting_garbage,
    recompiles,
    graph_breaks,
    double_precision,
    thread_count,
    slow_fetch,
    slow_copies,
    logging_cost,
    tensor_cores_idle,
    launch_bound,
    too_many_workers,
    python_between,
    slowing_down,
    layout_copies,
    gradients_zeroed,
    eval_without_no_grad,
    loss_kept_with_graph,
    graph_kept_for_nothing,
    loader_cycled,
    tensor_as_key,
    leak,
    host_growth,
    fragmentation,
    memory_limit,
    scaler_update_missing,
    whole_model_saved,
    load_without_map_location,
    load_runs_code,
    main_guard_missing,
    forward_called,
    data_parallel_loss,
    bce_under_autocast,
    backward_under_autocast,
    deterministic_with_benchmark,
    tensor_of_tensor,
    checkpoint_without_optimizer,
    saved_by_every_rank,
    softmax_without_dim,
    ignore_without_effect,
    tiny_batch_norm,
)
