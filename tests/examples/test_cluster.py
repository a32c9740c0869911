"""The examples for clusters name what there is. No cluster runs them here."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from cusearch_async.cli import check
from cusearch_async.cli.preflight.gpus import Device
from cusearch_async.cli.preflight.shapes import shape_of
from cusearch_async.config import load_config
from cusearch_async.lifecycle import gpus
from cusearch_async.processes.start import PROCESSES
from tests.agents.test_sdks import PYTHON as SDK_PYTHON
from tests.conftest import SLOW, free_port, wait_until

CLUSTER = Path(__file__).parents[2] / "docs" / "examples" / "cluster"
FILES = ("slurm.sh", "kubernetes.yaml")


@pytest.mark.system  # a pass of the whole model is counted
def test_the_config_passes_check():
    config = load_config(CLUSTER / "cluster.toml")
    found = list(check.check(config, shape_of(config.model), Device(80.0, "as the test says")))
    assert "learner memory" in {finding.what for finding in found}
    assert [finding for finding in found if finding.status == "error"] == []


@pytest.mark.parametrize("name", FILES)
def test_what_is_started_exists_and_all_of_it_is_started(name):
    text = (CLUSTER / name).read_text(encoding="utf-8")
    for module in re.findall(r"cusearch_async[\w.]+", text):
        assert importlib.util.find_spec(module), module
    started = set(re.findall(r"(?:START|worker)[\",\s-]+(\w+)", text)) & {*PROCESSES}
    assert started == {"learner", "rollout", "retriever"}
    settings = re.findall(r"--(\w+\.\w+) ([^\s\"]+)", text)
    load_config(CLUSTER / "cluster.toml", [part for key, value in settings for part in (f"--{key}", value)])


@pytest.mark.parametrize("name", FILES)
def test_torchrun_knows_the_options_and_starts_as_many_ranks_as_the_config_says(name):
    from torch.distributed.run import get_args_parser

    text = (CLUSTER / name).read_text(encoding="utf-8").replace("\n            - ", " ").replace("\\\n", " ")
    options = re.search(r"torchrun\]?\s+(?:args:)?\s*(--.*? --no-python )", text)
    assert options
    parsed = get_args_parser().parse_args([*options[1].split(), "script"])
    learner = load_config(CLUSTER / "cluster.toml").learner
    assert (int(parsed.nnodes), int(parsed.nproc_per_node)) == (learner.nodes, learner.ranks_per_node)


def test_rank_0_of_the_learner_has_a_retriever_to_ask():
    """It must know what the run's searches are answered from, before it takes the run over."""
    slurm = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    learners = re.findall(r'^on "\$HEAD,\$\{NODES\[1\]\}" 2 \'(.*?)\'$', slurm, re.MULTILINE | re.DOTALL)
    assert "$START retriever $SETTINGS" in learners, "torchrun sorts the nodes by name: rank 0 may be on either"
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8"))
    learner = next(job for job in jobs if job["kind"] == "Job" and job["metadata"]["name"] == "learner")
    (retriever,) = learner["spec"]["template"]["spec"]["initContainers"]
    assert (retriever["restartPolicy"], retriever["command"][-2:]) == ("Always", ["retriever", "/shared/cluster.toml"])


def test_the_script_is_valid_bash():
    subprocess.run(["bash", "-n", str(CLUSTER / "slurm.sh")], check=True)


def test_every_step_of_slurm_gets_the_cores_of_its_task(tmp_path):
    """Since 22.05 srun does not take the number from sbatch: eight engines shared one core, without an error."""
    calls = {
        "srun": 'echo "${SRUN_CPUS_PER_TASK-none}" >> "$CALLS"; until [ $(wc -l < "$CALLS") = 4 ]; do sleep 0.05; done',
        "scontrol": "printf '%s\\n' node-{1..4}",
        "scancel": "",
    }
    for name, does in calls.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    text = (CLUSTER / "slurm.sh").read_text(encoding="utf-8").replace("/shared", str(tmp_path))
    env = os.environ | {"CALLS": str(tmp_path / "calls"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "1", "CUSEARCH_REDIS_PASSWORD": "x"}
    subprocess.run(["bash", "-c", text], env=env, check=False, timeout=20 * SLOW)
    assert (tmp_path / "calls").read_text().split() == ["64"] * 4


def test_an_image_that_is_on_the_nodes_is_used():
    """Without a tag a registry is asked each time."""
    yaml = pytest.importorskip("yaml")
    for name in ("kubernetes.yaml", "autoscale.yaml"):
        for document in yaml.safe_load_all((CLUSTER / name).read_text(encoding="utf-8")):
            pod = document["spec"].get("template", {}).get("spec", {})
            pod = document["spec"].get("jobTargetRef", {}).get("template", {}).get("spec", {}) or pod
            for container in (*pod.get("containers", []), *pod.get("initContainers", [])):
                if container["image"] == "cusearch":
                    assert container["imagePullPolicy"] == "IfNotPresent", (name, container["name"])


STARTED = """#!/bin/bash
# In place of a process of the run: a retriever serves until it is killed, a worker fails at its first start.
echo "$1 ${CUDA_VISIBLE_DEVICES-all} ${*:3}" >> "$STARTS"
[ "$1" = retriever ] && exec sleep 1000
mkdir "$STARTS.failed" 2>/dev/null && exit 1
exit 0
"""


@pytest.fixture
def started_by_slurm(tmp_path) -> list[list[str]]:
    """What the script starts on a node of workers: (process, CUDA_VISIBLE_DEVICES, options). It runs until the workers
    have ended."""
    text = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    on_node = re.search(r"on \"\$\{NODES\[2\]\},\$\{NODES\[3\]\}\" 2 '(.*?)'\n", text, re.DOTALL)
    assert on_node
    script, starts = tmp_path / "start", tmp_path / "starts"
    script.write_text(STARTED)
    script.chmod(0o755)
    env = os.environ | {"START": str(script), "SETTINGS": "/shared/cluster.toml", "STARTS": str(starts)}
    env |= {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}  # as Slurm sets it for 8 GPUs of a node
    done = subprocess.run(["bash", "-c", f"sleep() {{ :; }}\n{on_node[1]}"], env=env, check=False, timeout=20 * SLOW)
    assert done.returncode == 0
    return [line.split() for line in starts.read_text().splitlines()]


def test_slurm_starts_a_worker_again_that_fails_and_ends_with_the_workers(started_by_slurm):
    assert [start[0] for start in started_by_slurm].count("retriever") == 1
    assert [start[0] for start in started_by_slurm].count("rollout") == 8 + 1


def cancelled(command: list[str], env: dict[str, str]) -> str:
    """What it says where it cancels its job."""
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=20 * SLOW)
    assert Path(env["DATA"], f"cancelled-{env['SLURM_JOB_ID']}").exists()
    return done.stderr


def test_two_redis_servers_of_slurm_never_have_one_folder(tmp_path):
    """Their data was in /shared/redis, whatever the run: the second job found the first one's, and lost its own."""
    text = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    assert re.search(r"DATA=\S*\$\{RUN", text), "a folder for each run"
    on_head = re.search(r"on \"\$HEAD\" 1 '(.*?)'\n", text, re.DOTALL)
    assert on_head
    server, settings = tmp_path / "redis-server", tmp_path / "settings"
    server.write_text('#!/bin/bash\ncat > "$DATA/settings"\nexec sleep 1000\n')
    (tmp_path / "scancel").write_text('#!/bin/bash\ntouch "$DATA/cancelled-$1"\n')
    for program in (server, tmp_path / "scancel"):
        program.chmod(0o755)
    env = os.environ | {
        "DATA": str(tmp_path),
        "CUSEARCH_REDIS_PASSWORD": "x",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    command = ["bash", "-c", on_head[1].replace("-w 180", "-w 0")]
    first = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        wait_until(lambda: settings.exists() and settings.stat().st_size > 0, 20)
        assert f"dir {tmp_path}" in settings.read_text().splitlines()
        assert cancelled(command, env | {"SLURM_JOB_ID": "2"}) == f"another Redis has {tmp_path}\n"
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    server.write_text("#!/bin/bash\nexit 3\n")
    told = "Redis has ended with status 3\n"
    assert cancelled(command, env | {"SLURM_JOB_ID": "3"}) == told, "an address in use, or damaged data"


def take_gpus(monkeypatch, tmp_path, host: str, visible: str, options: tuple[str, ...], count: int) -> list[str]:
    """The GPUs that `count` workers of a faked host take."""
    (tmp_path / host).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / host))
    monkeypatch.setattr(gpus, "has_card", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpus, "_held", held := [])
    config = load_config(CLUSTER / "cluster.toml", list(options))
    taken = [gpu for _ in range(count) for gpu in gpus.take_for_engine("worker", config)]
    for locks in held:
        locks.close()
    return taken


def test_all_sixteen_workers_of_slurm_get_a_gpu(started_by_slurm, monkeypatch, tmp_path):
    workers = [start for start in started_by_slurm if start[0] == "rollout"][1:]
    (visible,), (options,) = {start[1] for start in workers}, {tuple(start[2:]) for start in workers}
    for host in ("node-3", "node-4"):
        found = take_gpus(monkeypatch, tmp_path, host, visible, options, len(workers))
        assert sorted(found) == [str(gpu) for gpu in range(8)]


def test_a_worker_of_kubernetes_has_time_to_drain():
    """Before the pod is killed; and the one that autoscaling adds is the same."""
    yaml, pods = pytest.importorskip("yaml"), []
    for name in ("kubernetes.yaml", "autoscale.yaml"):
        for document in yaml.safe_load_all((CLUSTER / name).read_text(encoding="utf-8")):
            pod = document["spec"].get("template", {}).get("spec", {})
            if any("rollout" in container["command"] for container in pod.get("containers", [])):
                pods.append(pod | {"restartPolicy": ""})
    one, other = pods
    assert one == other
    _, _, _, config, *options = one["containers"][0]["command"]
    assert config == "/shared/cluster.toml"
    drain_s = load_config(CLUSTER / "cluster.toml", options).rollout.drain_s
    assert drain_s + 20 < one["terminationGracePeriodSeconds"]


async def test_the_probe_of_the_page_is_right(monkeypatch, tmp_path):
    """What the manifest runs, against the page of a run without a learner, and of one that is well."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8"))
    (page,) = next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    *python, script = page["readinessProbe"]["exec"]["command"]
    assert python == ["python", "-c"]
    port = free_port()
    asked = []

    async def health(request):
        asked.append(request.headers["Authorization"])
        return web.json_response({}, status=503 if len(asked) == 1 else 200)

    app = web.Application()
    app.add_routes([web.get("/cluster/healthz", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    env = os.environ | {"CUSEARCH_PAGE_TOKEN": "a-token"}
    for status in (1, 0):
        text = script.replace("8787", str(port))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", text, env=env, stderr=subprocess.DEVNULL)
        assert await process.wait() == status
    await runner.cleanup()
    assert asked == ["Bearer a-token"] * 2


VALIDATE = SDK_PYTHON.with_name("kubernetes-validate")


@pytest.mark.slow
@pytest.mark.skipif(not VALIDATE.exists(), reason=f"{VALIDATE}: make setup-sdks")
@pytest.mark.parametrize("name", ["kubernetes.yaml", "autoscale.yaml"])
def test_kubernetes_knows_every_field(name):
    subprocess.run([VALIDATE, "--strict", str(CLUSTER / name)], check=True)


def test_a_worker_of_kubernetes_gets_the_gpu_of_its_pod_and_ends_with_the_run(monkeypatch, tmp_path):
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8")))
    kinds = ["Service", "StatefulSet", "Service", "Deployment", "Service", "NetworkPolicy", "Job", "Job"]
    assert [document["kind"] for document in documents] == kinds
    job = documents[-1]["spec"]
    pod = job["template"]["spec"]
    assert (job["completions"], job["parallelism"], pod["restartPolicy"]) == (16, 16, "OnFailure")
    (worker,), (retriever,) = pod["containers"], pod["initContainers"]
    assert retriever["restartPolicy"] == "Always", "it neither keeps the pod from ending nor the worker from starting"
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
    options = tuple(worker["command"][4:])
    pods = [take_gpus(monkeypatch, tmp_path, f"pod-{pod}", "0", options, 1) for pod in range(job["parallelism"])]
    assert pods == [["0"]] * 16


def test_what_the_page_says_of_deepspeeds_launcher_is_so():
    """It named ssh alone, and that a stop waits for the step."""
    package = importlib.util.find_spec("deepspeed")
    if package is None:
        pytest.skip("DeepSpeed is not installed")
    launcher = Path(package.origin).parent / "launcher"
    assert "PDSH_LAUNCHER = 'pdsh'" in (launcher / "constants.py").read_text(encoding="utf-8")
    assert "default=PDSH_LAUNCHER" in re.sub(r"\s", "", (launcher / "runner.py").read_text(encoding="utf-8"))
    stop = (launcher / "launch.py").read_text(encoding="utf-8").partition("def terminate_process_tree")[2]
    (seconds,) = re.findall(r"wait_procs\(children, timeout=(\d+)\)", stop)
    page = (CLUSTER.parents[1] / "nodes.md").read_text(encoding="utf-8")
    assert "`pdsh`" in page
    assert f"kills ranks after {seconds} s" in page
