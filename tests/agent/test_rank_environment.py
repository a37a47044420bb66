"""A process of a torchrun agent becomes a rank of a single-process program."""

import pytest

from flatout.agent.rank_environment import from_torchrun, own_device
from flatout.distributed.single_process import broadcast_text, store
from flatout.job.rank_environment import RankEnvironment, this_rank

SET = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "40001",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/tmp/e",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
}
OTHER = {"HOME": "/root", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "2", "MASTERPIECE": "1"}


def test_torchruns_variables_are_translated_and_removed():
    environment = {**SET, **OTHER}
    info = from_torchrun(environment)
    assert info == RankEnvironment(5, 1, 8, 4, "tcp://10.0.0.1:40001/0.8")
    assert environment == {
        **OTHER,
        "FLATOUT_RANK": "5",
        "FLATOUT_LOCAL_RANK": "1",
        "FLATOUT_WORLD_SIZE": "8",
        "FLATOUT_LOCAL_WORLD_SIZE": "4",
        "FLATOUT_RENDEZVOUS": "tcp://10.0.0.1:40001/0.8",
        "FLATOUT_ERROR_FILE": "/tmp/e",
    }
    assert this_rank(environment) == info
    assert from_torchrun(environment) is None  # its children belong to no agent


def test_an_address_of_ipv6_stays_one_place():
    info = from_torchrun({**SET, "MASTER_ADDR": "fe80::1"})
    assert info is not None
    assert info.rendezvous == "tcp://[fe80::1]:40001/0.8"


@pytest.mark.parametrize(
    "environment", [{}, OTHER, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}]
)
def test_a_process_of_no_agent_is_left_alone(environment):
    before = dict(environment)
    assert from_torchrun(environment) is None
    assert environment == before
    assert this_rank(environment) is None


def test_an_agent_without_a_store_is_rejected_with_the_next_command():
    with pytest.raises(ValueError, match="use --rdzv-backend c10d"):
        from_torchrun({**SET, "TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_each_rank_has_one_device_of_those_that_are_visible():
    environment = {**SET, "CUDA_VISIBLE_DEVICES": "3, GPU-8f2a,5"}
    from_torchrun(environment, one_device=True)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-8f2a"
    assert own_device(None, 2) == "2"
    with pytest.raises(ValueError, match="--gpus 2"):
        own_device("3,4", 2)
    with pytest.raises(ValueError, match="names 0"):
        own_device("", 0)


def test_ranks_rendezvous_at_either_kind_of_address(tmp_path):
    torch = pytest.importorskip("torch")
    host = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for meeting in (f"file://{tmp_path}/rendezvous", f"tcp://127.0.0.1:{host.port}"):
        first, second = (store(torch, RankEnvironment(rank, rank, 2, 2, meeting), 5.0) for rank in (0, 1))
        first.set("key", meeting)
        assert second.get("key").decode() == meeting
    first, again = (
        RankEnvironment(0, 0, 2, 2, f"tcp://127.0.0.1:{host.port}/{number}.2") for number in (0, 1)
    )
    second = RankEnvironment(1, 0, 2, 1, first.rendezvous)
    assert broadcast_text(torch, first, "its plan") == broadcast_text(torch, second, "another") == "its plan"
    assert not store(torch, again, 5.0).check(["text"])  # a restart reads nothing of the round before
    with pytest.raises(ValueError, match="not a valid rendezvous"):
        store(torch, RankEnvironment(0, 0, 1, 1, "tcp://nowhere"), 1.0)
