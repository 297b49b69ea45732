"""Without a cluster, a local one is started, for this machine only, and nothing is left of it."""

import json
import subprocess
import sys

import psutil
import pytest

pytest.importorskip("ray")

PROGRAM = """
import json
from functools import partial
import psutil
from list_collector import always_four
from ray_envs import make_env
from flatroll.buffers import LazyTensorStorage, RayReplayBuffer
from flatroll.rollouts import RayCollector

if __name__ == "__main__":
    actors = RayCollector(make_env, always_four, num_collectors=2, frames_per_batch=6, total_frames=24, writer=2)
    buffer = RayReplayBuffer(storage=partial(LazyTensorStorage, 100))
    for batch in actors:
        buffer.extend(batch)
    import ray
    mine = psutil.Process().children(recursive=True)
    listening = [
        connection.laddr.ip
        for process in [psutil.Process(), *mine]
        for connection in process.net_connections()
        if connection.status == "LISTEN"
    ]
    store = ray.cluster_resources()["object_store_memory"]
    rows = len(buffer)
    buffer.shutdown()
    actors.shutdown()
    gone = not ray.is_initialized()
    ended = psutil.wait_procs(mine, timeout=600)[1] == []
    print(json.dumps([rows, sorted(set(listening)), store <= 2**30, gone, ended, sorted(p.pid for p in mine)]))
"""


def test_a_local_cluster_listens_on_this_machine_only_and_leaves_no_process(paths):
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows, listening, bounded, gone, ended, pids = json.loads(done.stdout)
    assert rows == 24
    assert listening and all(address in ("127.0.0.1", "::ffff:127.0.0.1") for address in listening)
    assert bounded and gone and ended
    assert len(pids) > 5 and not [pid for pid in pids if psutil.pid_exists(pid)]
