"""Other trainers as referees: where they are right, we agree with them; where they are not, we are still right.

What a peer does wrong is recorded, not asserted: it is theirs to change. The one fault asserted here is planted, the
plain loop's division by the number of micro-batches asked for.
"""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from benchmarks import peers
from benchmarks.peers import Case, Peer
from torch.nn.utils import parameters_to_vector

pytestmark = [
    pytest.mark.peers,
    # What Lightning says of machines with more cores, a GPU or Slurm, and its own calls under torch 2.13
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available on your system but is not used"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

EXACT = 1e-13
# Fabric hands outputs back in float32; transformers computes its own losses in it, and parts of Llama.
FLOAT32 = 1e-6

RIGHT = [
    *((peer, peers.EVEN) for peer in peers.PEERS if peers.EVEN in peer.cases and peer is not peers.THIS),
    *((peers.ACCELERATE_ITEMS, case) for case in peers.CASES if case is not peers.EVEN),
    *((peers.HF_ITEMS, case) for case in peers.OWN_CASES if case is not peers.EVEN),
    (peers.HF_MEAN, peers.SHORT),
    (peers.HF_MODEL, peers.LLAMA),
]


def name(value: Case | Peer) -> str:
    return value.title


def skip_unless_installed(peer: Peer, case: Case) -> None:
    if missing := peers.missing(peer, case):
        pytest.skip(f"needs {' and '.join(missing)}: pip install 'accum-sweep[peers]'")


def tolerance(peer: Peer, case: Case) -> float:
    return FLOAT32 if peer in (peers.FABRIC, peers.HF_MODEL) or case is peers.LLAMA else EXACT


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, no file outside the test's folder by a relative path, and no setting left behind."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a trainer reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("peer", "case"), RIGHT, ids=name)
def test_a_peer_that_is_right_feeds_the_optimizer_our_gradient(peer: Peer, case: Case, tmp_path: Path) -> None:
    skip_unless_installed(peer, case)
    ours, theirs = peers.this_package(case, tmp_path), peer.run(case, tmp_path)
    assert len(ours) == len(theirs) == len(case.windows)
    for our, their in zip(ours, theirs, strict=True):
        difference = float((our.gradient - their.gradient).norm() / their.gradient.norm())
        assert difference <= tolerance(peer, case)


@pytest.mark.parametrize("case", peers.CASES, ids=name)
def test_ours_is_the_full_batchs_gradient_whatever_peers_make_of_it(
    case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    skip_unless_installed(peers.THIS, case)
    ours = peers.worst_error(case, peers.this_package(case, tmp_path))
    assert ours is not None
    assert ours <= tolerance(peers.THIS, case)
    for peer in peers.PEERS:
        if case in peer.cases and not peers.missing(peer, case):
            record_property(peer.title, peers.worst_error(case, peer.run(case, tmp_path)))


@pytest.mark.parametrize("case", [peers.UNEVEN, peers.SHORT, peers.TOKENS], ids=name)
def test_the_referee_sees_a_nominal_divisor(case: Case, tmp_path: Path) -> None:
    error = peers.worst_error(case, peers.plain_loop(case, tmp_path))
    assert error is not None
    assert error > 0.1


def test_the_referee_sees_a_window_that_never_stepped(tmp_path: Path) -> None:
    seen = peers.this_package(peers.SHORT, tmp_path)
    assert peers.worst_error(peers.SHORT, seen[:-1]) is None


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peers.EVEN in peer.cases], ids=name)
def test_trains_to_the_weights_of_full_batches(peer: Peer, tmp_path: Path) -> None:
    case = peers.EVEN
    skip_unless_installed(peer, case)
    weights = parameters_to_vector(case.model().parameters()).detach()
    for window in case.windows:
        weights = weights - peers.LEARNING_RATE * peers.full_batch_gradient(case, window, weights)
    found = peer.run(case, tmp_path)[-1].after
    assert float((found - weights).norm() / weights.norm()) <= tolerance(peer, case)


def test_the_page_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda package: package in ("accum_sweep", "torch"))
    page = peers.report()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    cells = {row[0].removeprefix("| "): row[1:-1] for row in rows[2:]}
    assert cells.keys() == {peer.title for peer in peers.PEERS}
    assert cells["Lightning Trainer"] == ["not installed"] * len(peers.CASES)
    assert all("**" not in cell for cell in cells["accum-sweep"])
    assert "**" in cells["plain loop"][1]
    assert f"torch {torch.__version__};" in page
