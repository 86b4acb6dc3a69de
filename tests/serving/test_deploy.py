"""Files of `deploy/`: they are whole, start the server by its own options, and name metrics and limits that it has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from typer.main import get_command

from rm_optimizer.interfaces import cli
from rm_optimizer.interfaces.commands.serve import GRACEFUL_SECONDS, KEEP_ALIVE_SECONDS
from rm_optimizer.serving.embedded import ray_replicas
from rm_optimizer.serving.http.gate import BODY_SECONDS, MAX_BODY_BYTES, OPEN_PATHS
from rm_optimizer.serving.options import ServeOptions, WorkerOptions
from rm_optimizer.serving.service.telemetry import ServerMetrics

TOOL = next(
    (
        tool
        for tool in filter(None, map(shutil.which, ("docker", "podman")))
        if not subprocess.run([tool, "info"], capture_output=True, check=False).returncode
    ),
    None,
)
"""A container tool that can build; None without one, or where its service does not run."""
DEPLOY = Path(__file__).parents[2] / "deploy"


def text_of(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def deployment() -> dict[str, Any]:
    container = next(yaml.safe_load_all(text_of("kubernetes.yaml")))["spec"]["template"]["spec"]
    return container | container["containers"][0]


def commands() -> list[list[str]]:
    docker = json.loads(text_of("Dockerfile").partition("\nCMD ")[2])
    unit = shlex.split(re.search(r"ExecStart=\S+/rm-opt serve (.*)", text_of("rm-opt.service"))[1])  # type: ignore[index]
    return [docker, deployment()["args"], unit]


@pytest.mark.parametrize("arguments", commands(), ids=["docker", "kubernetes", "systemd"])
def test_the_server_is_started_by_options_that_it_has(arguments: list[str]):
    serve = get_command(cli.app).get_command(click.Context(get_command(cli.app)), "serve")  # type: ignore[attr-defined]
    given = serve.make_context("serve", list(arguments)).params
    assert (given["host"], given["access_log"] in ("text", "json")) == ("0.0.0.0", True)
    ServeOptions(**given)


def test_files_are_whole():
    for name in ("compose.yaml", "prometheus.yaml", "kubernetes.yaml"):
        assert all(yaml.safe_load_all(text_of(name)))
    for name in ("nginx.conf", "haproxy.cfg"):
        assert text_of(name).count("{") == text_of(name).count("}")
    services = yaml.safe_load(text_of("compose.yaml"))["services"]
    mounted = [volume for each in services.values() for volume in each.get("volumes", ()) if volume.startswith("./")]
    assert all((DEPLOY / volume.split(":")[0]).is_file() for volume in mounted)


def test_the_application_for_a_ray_cluster_has_the_arguments_of_its_builder():
    [application] = yaml.safe_load(text_of("ray-serve.yaml"))["applications"]
    module, _, builder = application["import_path"].partition(":")
    assert (module, builder) == (ray_replicas.__name__, ray_replicas.application.__name__)
    assert application["name"] == ray_replicas.APPLICATION
    assert [each["name"] for each in application["deployments"]] == [ray_replicas.DEPLOYMENT]
    arguments = dict(application["args"])
    assert arguments.pop("folder")
    WorkerOptions(**arguments)


def test_a_dashboard_asks_for_metrics_that_there_are():
    names = {
        f"{family.name}{end}" for family in ServerMetrics().registry.collect() for end in ("", "_total", "_bucket")
    }
    panels = json.loads(text_of("grafana.json"))["panels"]
    asked = {
        name
        for panel in panels
        for each in panel["targets"]
        for name in re.findall(r"\b(?:rm|process)_\w+", each["expr"])
    }
    assert len(asked) > 10
    assert asked <= names


def test_probes_and_limits_are_those_of_the_server():
    pod = deployment()
    for probe in ("startupProbe", "livenessProbe"):
        assert pod[probe]["httpGet"]["path"] in OPEN_PATHS  # a probe has no key
    assert "/ready" in pod["readinessProbe"]["exec"]["command"][-1]
    compile(pod["readinessProbe"]["exec"]["command"][-1], "probe", "exec")
    grace = [
        pod["terminationGracePeriodSeconds"],
        int(re.search(r"TimeoutStopSec=(\d+)", text_of("rm-opt.service"))[1]),
    ]  # type: ignore[index]
    assert min(grace) > GRACEFUL_SECONDS
    nginx = text_of("nginx.conf")
    assert f"client_max_body_size {MAX_BODY_BYTES >> 20}m;" in nginx
    assert f"client_body_timeout {BODY_SECONDS:.0f}s;" in nginx
    assert int(re.search(r"keepalive_timeout (\d+)s", nginx)[1]) < KEEP_ALIVE_SECONDS  # type: ignore[index]


def test_the_image_copies_files_that_there_are_by_known_instructions():
    lines = [line for line in re.sub(r"\\\n", " ", text_of("Dockerfile")).splitlines() if line and line[0] != "#"]
    words = [line.split() for line in lines]
    assert words[0][0] == "FROM"
    known = "FROM ARG WORKDIR COPY RUN ENV USER VOLUME EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD"
    assert {each[0] for each in words} <= {*known.split()}
    copied = [name for each in words if each[0] == "COPY" for name in each[1:-1] if not name.startswith("--")]
    assert copied
    assert all((DEPLOY.parent / name).exists() for name in copied)


@pytest.mark.slow
@pytest.mark.skipif(TOOL is None, reason="there is no container tool")
def test_the_image_is_built():
    subprocess.run([str(TOOL), "build", "-f", "deploy/Dockerfile", "."], cwd=DEPLOY.parent, check=True, timeout=1800)
