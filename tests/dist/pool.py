"""Run a function on 1 to 8 gloo ranks, each a fresh process forked from a template that has done the slow imports.

One template a pytest run and kind (plain torch, or Megatron on the CPU backend) imports once; a job's ranks are forked
from it in milliseconds and end with the job. So no job sees what another left behind: Megatron's
`destroy_model_parallel` mostly sets groups to None, and argument, RNG and micro-batch globals stay.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_stability.megatron import cpu

PREPARE_SECONDS, GRACE_SECONDS = 240.0, 10.0
SAVE_MODULE = "megatron.core.dist_checkpointing.strategies.filesystem_async"


class RankTimeout(Exception):  # noqa: N818
    """Ranks did not finish in time; `ranks` are those outside a collective, or all if each waits in one."""

    def __init__(self, seconds: float, ranks: list[int], stacks: dict[int, str]) -> None:
        shown = "\n".join(f"--- rank {rank}\n{stack}" for rank, stack in sorted(stacks.items()))
        waiting = sorted(set(stacks) - set(ranks))
        also = f"; ranks {waiting} wait in a collective" if waiting else ""
        super().__init__(f"after {seconds:g} s stuck: rank {', '.join(map(str, ranks))}{also}\n{shown}")
        self.ranks, self.stacks = ranks, stacks


class RankDied(Exception):  # noqa: N818
    """A rank's process ended without an answer."""


@dataclass(frozen=True)
class Context:
    """What a job's function is handed first: its `rank` of `world`, and the gloo `group` of all ranks."""

    rank: int
    world: int
    group: dist.ProcessGroup

    def megatron(
        self, tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None, seed: int = 1234
    ) -> None:
        """Install the CPU backend and initialise Megatron's parallel state and RNG tracker for a layout.

        Args:
            tp: Tensor-parallel size.
            pp: Pipeline-parallel size; the data-parallel size follows from the world's.
            vpp: Virtual pipeline stages a rank.
            ep: Expert-parallel size.
            etp: Expert-tensor-parallel size, None for `tp`.
            seed: Seed of host and device RNG.
        """
        cpu.install()
        from megatron.core import parallel_state, tensor_parallel

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def torch_only() -> None:
    """Prepare a template for jobs that need torch alone; test modules import pytest."""
    importlib.import_module("pytest")


def megatron_on_cpu() -> None:
    """Prepare a template whose ranks have Megatron's training loop on the CPU backend."""
    torch_only()
    cpu.install()
    import_megatron()


def import_megatron() -> None:
    """Import the plugin's Megatron side, and what Megatron itself imports in mid-run, some 10 CPU seconds a rank."""
    for name in (
        "megatron_stability.megatron.start.pretrain_gpt",
        "megatron_stability.megatron.runtime",
        "megatron.core.dist_checkpointing.strategies.fully_parallel",
        "megatron.core.dist_checkpointing.strategies.torch",
        SAVE_MODULE,
        "megatron.core.tokenizers.text.text_tokenizer",
        "torch.distributed.checkpoint.state_dict_loader",
    ):
        importlib.import_module(name)
    # The server of a save's results is spawned by default, and would import torch again, for seconds, in each rank.
    sys.modules[SAVE_MODULE].get_write_results_queue.__wrapped__.__defaults__ = ("fork",)


class Pool:
    """A template process, started at the first job, and the jobs forked from it.

    Args:
        prepare: Top-level function that the template runs once; its imports and installs are the ranks' starting point.
    """

    def __init__(self, prepare: Callable[[], None] = torch_only) -> None:
        self._prepare = prepare
        self._template: tuple[multiprocessing.process.BaseProcess, Connection] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60.0) -> list[Any]:
        """Call `fn(context, *args)` on `world` ranks and return what each returned, in rank order.

        Args:
            fn: A top-level function, pickled by name, like its arguments.
            args: The same on every rank.
            world: Number of ranks.
            timeout: Seconds until the job is stopped.

        Raises:
            RankTimeout: With the stuck ranks and the Python stack of each unfinished one.
            Exception: The first rank's own, with a note that holds the rank and its traceback.
        """
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            ranks = self._fork(Path(folder), world, timeout)
            try:
                job = pickle.dumps((fn, args))
                for _, connection in ranks.values():
                    connection.send((sys.path, job))
                return _collect(Path(folder), ranks, timeout)
            finally:
                for pid, connection in ranks.values():
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                    connection.close()

    def close(self) -> None:
        """End the template."""
        if self._template is not None:
            process, _ = self._template
            process.kill()
            process.join()
            self._template = None

    def _start(self) -> Connection:
        if self._template is None or not self._template[0].is_alive():
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_template, args=(theirs, self._prepare), name="rank template")
            process.start()
            theirs.close()
            self._template = (process, ours)
            if not ours.poll(PREPARE_SECONDS):
                self.close()
                raise TimeoutError(f"the template was not ready after {PREPARE_SECONDS:g} s")
            ours.recv()
        return self._template[1]

    def _fork(self, folder: Path, world: int, timeout: float) -> dict[int, tuple[int, Connection]]:
        template = self._start()
        ranks = {}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "socket"))
            server.listen(world)
            server.settimeout(GRACE_SECONDS)
            template.send((str(folder), world, timeout))
            for _ in range(world):
                connection = Connection(server.accept()[0].detach())
                rank, pid = connection.recv()
                ranks[rank] = (pid, connection)
        return dict(sorted(ranks.items()))


def _collect(folder: Path, ranks: dict[int, tuple[int, Connection]], timeout: float) -> list[Any]:
    """Results in rank order; a failure leaves the other ranks `GRACE_SECONDS` to notice that their peer is gone."""
    deadline = time.monotonic() + timeout
    pending = {connection: rank for rank, (_, connection) in ranks.items()}
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, BaseException]] = []
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise _timeout(folder, {rank: ranks[rank][0] for rank in pending.values()}, timeout)
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)
            try:
                failed_at, answer = _Answer(io.BytesIO(connection.recv_bytes())).load()
            except EOFError:
                failed_at, answer = (
                    -1.0,
                    RankDied(f"rank {rank} ended without an answer"),
                )  # the cause, whoever reports first
            if failed_at:
                failures.append((failed_at, rank, answer))
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            else:
                results[rank] = answer
    if failures:
        raise min(failures, key=lambda failure: failure[:2])[2]
    return [results[rank] for rank in ranks]


class _Answer(pickle.Unpickler):  # noqa: S301 - of our own forked rank
    """Megatron puts a function of its own into pickled tensors; torch's does the same here, and spares the test
    process the import of Megatron, which takes longer than most tests.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("megatron.core.safe_globals", "safe_load_from_bytes"):
            module, name = "torch.storage", "_load_from_bytes"
        return super().find_class(module, name)


def _timeout(folder: Path, pids: dict[int, int], seconds: float) -> RankTimeout:
    stacks = {}
    for rank, pid in pids.items():
        file = folder / f"stack.{rank}"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        for _ in range(100):  # a stopped process writes nothing: the wait is bounded
            time.sleep(0.02)
            if stack := file.read_text():
                break
        own_frames = stack.find(f'File "{__file__}"')
        stacks[rank] = stack[:own_frames].rstrip() or "(no stack: the process does not run)"
    stuck = [rank for rank, stack in stacks.items() if "torch/distributed/" not in stack]
    return RankTimeout(seconds, stuck or list(stacks), stacks)


def _die_with_parent() -> None:
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of Linux's prctl: no rank outlives an interrupted test run
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _template(connection: Connection, prepare: Callable[[], None]) -> None:
    """Prepare once, then fork a job's ranks at each request; single-threaded, so that forking is safe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(cpu.environment())
    torch.set_num_threads(1)
    prepare()
    gc.freeze()  # a rank's collector leaves the imported modules' pages shared
    connection.send("ready")
    fork = multiprocessing.get_context("fork")
    while True:
        try:
            folder, world, timeout = connection.recv()
        except EOFError:  # the test run is gone
            os._exit(0)
        for rank in range(world):
            fork.Process(target=_rank, args=(connection, Path(folder), rank, world, timeout)).start()


def _rank(template: Connection, folder: Path, rank: int, world: int, timeout: float) -> None:
    template.close()
    os.setpgid(0, 0)
    _die_with_parent()
    with socket.socket(socket.AF_UNIX) as client, (folder / f"stack.{rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        client.connect(str(folder / "socket"))
        connection = Connection(client.detach())
        os.register_at_fork(after_in_child=connection.close)  # a rank's child that outlives it must not hold the line
        connection.send((rank, os.getpid()))
        try:
            answer = pickle.dumps((0.0, _work(connection, folder, rank, world, timeout)))
        except BaseException as error:
            failed_at = time.monotonic()
            note = f"on rank {rank} of {world}:\n{traceback.format_exc()}"
            answer = _portable(failed_at, error, note)
        connection.send_bytes(answer)
        os._exit(0)


def _work(connection: Connection, folder: Path, rank: int, world: int, timeout: float) -> Any:
    path, job = connection.recv()
    sys.path += [entry for entry in path if entry not in sys.path]  # what `prepare` put first stays first
    fn, args = pickle.loads(job)  # noqa: S301 - from our own parent
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2 * timeout))
    assert dist.group.WORLD is not None
    return fn(Context(rank, world, dist.group.WORLD), *args)


def _portable(failed_at: float, error: BaseException, note: str) -> bytes:
    """The exception as bytes that the parent can load, or a RuntimeError that quotes it."""
    try:
        error.add_note(note)
        answer = pickle.dumps((failed_at, error))
        pickle.loads(answer)  # noqa: S301 - just made
    except Exception:
        quoted = RuntimeError(f"{type(error).__name__}: {error}")
        quoted.add_note(note)
        return pickle.dumps((failed_at, quoted))
    return answer
