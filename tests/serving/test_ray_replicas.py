"""Replicas on a local Ray cluster of two nodes, real processes: one version, also while they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import yaml

from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from tests.serving.engines import exported
from tests.serving.running import free_socket, wait_ready
from tests.serving.server_processes import START
from tests.serving.test_fleet import serves, wait_for
from tests.serving.test_update_faults import asked_all_the_time, assert_whole, models_of
from tests.serving.test_weight_sync import PROMPTS, RESPONSES

pytestmark = pytest.mark.slow
NAME = "ray::ServeReplica:rm-opt:Replica"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    pytest.importorskip("grpc_reflection", reason="Ray Serve's own packages are not installed")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with free_socket() as taken:  # serve deploy speaks to the dashboard
        port = taken.getsockname()[1]
    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": port, "dashboard_host": "127.0.0.1"}
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", f"http://127.0.0.1:{port}")
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()


def replicas() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        if any(NAME in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_replicas_of_two_nodes_serve_one_version_and_a_killed_one_joins_with_it(cluster, tmp_path):
    original, checkpoint = exported("llama", tmp_path / "export"), tmp_path / "export"
    models, answers = models_of(checkpoint, 4), []
    with free_socket() as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", START, "serve", str(checkpoint), "--port", str(port), "--threads", "1"]
    command += ["--token-budget", "512", "--replicas", "2", "--ray", "--state", str(tmp_path / "state")]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    server = SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process)
    try:
        wait_ready(server)
        wait_for(lambda: len(replicas()) == 2, 60)
        wait_for(lambda: httpx.get(f"{server.url}/metrics").text.count('rm_replica_memory_bytes{replica="') == 2, 60)
        served = httpx.get(f"{server.url}/version").json()["version"]
        rewards = {served: original.score(PROMPTS, RESPONSES)}
        rewards |= {f"v{number}": model.score(PROMPTS, RESPONSES) for number, model in enumerate(models)}
        with create_rm_publisher(server.url) as publisher, asked_all_the_time(server.url, answers):
            publisher.publish(models[0], "v0")
            threading.Timer(0.1, replicas()[0].send_signal, (signal.SIGKILL,)).start()
            publisher.publish(models[1], "v1")
            wait_for(lambda: len(replicas()) == 2)
            threading.Timer(0.1, replicas()[-1].send_signal, (signal.SIGSTOP,)).start()
            publisher.publish(models[2], "v2")
            [front] = psutil.Process(process.pid).children()
            front.kill()
            wait_for(lambda: serves(server, "v2"))
            publisher.publish(models[3], "v3")
        with RewardClient(server.url) as client:
            answers.append(client.score_versioned(PROMPTS, RESPONSES))
        assert answers[-1].version == "v3"
        assert_whole(answers, rewards)
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0
    wait_for(lambda: not replicas())


def test_the_application_of_the_file_in_deploy_serves_behind_a_listener_and_outlives_it(cluster, tmp_path):
    original, checkpoint = exported("llama", tmp_path / "export"), tmp_path / "export"
    config = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "ray-serve.yaml").read_text(encoding="utf-8"))
    [application] = config["applications"]
    own = {"checkpoint": str(checkpoint), "folder": str(tmp_path / "state"), "threads": 1, "token_budget": 512}
    assert application["args"].keys() <= own.keys()
    application["args"] = own
    application["deployments"][0]["ray_actor_options"] = {"num_cpus": 1}  # there are no GPUs here
    (tmp_path / "ray-serve.yaml").write_text(yaml.safe_dump(config))
    serve = Path(sys.executable).with_name("serve")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([serve, "deploy", tmp_path / "ray-serve.yaml"], env=environment, check=True, timeout=120)
    with free_socket() as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", START, "serve", str(checkpoint), "--port", str(port)]
    command += ["--replicas", "2", "--ray", "--state", str(tmp_path / "state")]
    process = subprocess.Popen(command, env=environment)
    server = SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process)
    try:
        wait_ready(server)
        wait_for(lambda: len(replicas()) == 2, 60)
        with RewardClient(server.url) as client:
            assert client.score(PROMPTS, RESPONSES) == pytest.approx(original.score(PROMPTS, RESPONSES), abs=1e-4)
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert len(replicas()) == 2  # the listener ends what it deployed alone
    subprocess.run([serve, "shutdown", "-y"], env=environment, check=True, timeout=120)
    wait_for(lambda: not replicas(), 60)
