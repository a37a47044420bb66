"""The faults that a training meets, and the test for each of them. Paths are below tests/, except bench/.

the process is killed at a random step                      loop/test_loop_resume.py, bench/resume.py
it is killed while it writes a checkpoint                   checkpoint/test_cuts.py: every call, bench/faults.py
SIGTERM, SIGINT, SIGHUP, SIGUSR1, twice, while saving       loop/test_loop_resume.py,
                                                            cli/test_supervise.py, test_rescue.py
a checkpoint is truncated                                   checkpoint/test_checkpoints.py:
                                        test_every_accident_is_detected_and_the_previous_checkpoint_used
a bit, a page, files of two checkpoints, an old manifest    the same, bench/faults.py
every checkpoint is corrupt                                 checkpoint/test_checkpoints.py:
                                        test_without_a_valid_checkpoint_training_does_not_start_from_scratch
a full disk, a limit                                        checkpoint/test_disks.py
read-only and vanishing folders                             checkpoint/test_disks.py;
                                                            without a home: cli/test_bad_days.py
a loader worker is killed, stopped, raises                  cli/test_supervise.py, bench/supervise.py
a rank is killed                                            launch/test_local_launcher.py, bench/resume.py
a rank is stopped, loops, sleeps                            cli/test_supervise.py
the launcher is killed                                      launch/test_local_launcher.py, bench/launcher.py
out of memory, injected                                     loop/test_loop_memory.py, bench/loop_faults.py
out of memory, real                                         loop/test_loop_memory.py, bench/loop_faults.py
memory that an exception keeps alive                        loop/test_loop_memory.py
not finite: loss, gradients, weights                        loop/test_loop_precision.py;
                                                            never saved: checkpoint/test_saver.py
clocks that jump, times of files                            checkpoint/test_checkpoints.py:
                                        test_order_is_by_step_and_no_clock_matters
two trainings in one folder                                 checkpoint/test_checkpoints.py:
                                        test_one_writer_at_a_time_and_a_killed_one_is_followed
hostile files                                               faults/test_hostile_files.py, bench/fuzz.py
a program that ends in its own way                          cli/test_run.py, cli/test_bad_days.py
a program that forks, spawns, changes folder and signals    cli/test_run.py, agent/test_bootstrap.py
100 MB on stdout, a closed one, binary                      launch/test_process.py
another machine, torch, number of threads on resume         loop/test_loop_resume.py
a power loss                                                checkpoint/test_cuts.py:
                                        test_a_loss_of_power_at_any_time, bench/faults.py
a plan that fails                                           trial/test_trial.py, cli/test_run.py
the same step crashes repeatedly                            cli/test_supervise.py
"""
