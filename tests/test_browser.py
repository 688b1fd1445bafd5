"""What a person sees in MLflow's pages: a real sweep, plain `mlflow ui`, the printed address in a real browser.

What is looked for is looked for in the document that the page's scripts have built, as soon as it is there.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from accum_sweep.record import Record, records

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed"),
]

BROWSER_FLAGS = [
    "--headless",
    "--no-sandbox",  # it does not start as root in a container otherwise, and the pages are ours
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-crash-reporter",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1600,1600",  # charts out of sight are not drawn
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # tests reach no network
]
NO_RUN = "0" * 32

# One worker, and none of the background jobs that no page here needs: ready in half the time.
QUICK_START = {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@dataclass(frozen=True)
class Site:
    """A finished sweep and the server that shows it."""

    parent_address: str  # as printed, with the server's own port
    parent_name: str
    printed: str  # what the program wrote to standard output
    runs: dict[str, Record]


class Browser:
    """Chromium, spoken to in its DevTools protocol: JSON messages, each with a zero byte behind it."""

    def __init__(self, program: subprocess.Popen[bytes]) -> None:
        assert program.stdin is not None
        assert program.stdout is not None
        self._questions, self._answers = program.stdin, program.stdout
        self._read = b""
        self._asked = 0

    def look(self, address: str, *awaited: str) -> "Page":
        """Open `address` and return the page once it shows all awaited texts, or as it is after half a minute."""
        target = self._ask("Target.createTarget", url=address)
        session = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        deadline = time.monotonic() + 30
        while True:
            page = Page(self._document(session))
            if set(awaited) <= set(page.texts) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self._ask("Target.closeTarget", targetId=target["targetId"])
        return page

    def _document(self, session: str) -> str:
        script = "document.documentElement.outerHTML"
        try:
            return str(self._ask("Runtime.evaluate", session, expression=script)["result"].get("value", ""))
        except LookupError:  # asked in the moment of navigation
            return ""

    def _ask(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        self._asked += 1
        question = {"id": self._asked, "method": method, "params": params}
        self._questions.write(json.dumps(question | ({"sessionId": session} if session else {})).encode() + b"\0")
        self._questions.flush()
        while (answer := self._next()).get("id") != self._asked:
            pass  # news that nobody asked for
        if "error" in answer:
            raise LookupError(answer["error"])
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], 60)
            piece = os.read(self._answers.fileno(), 2**16) if ready else b""
            assert piece, "the browser does not answer"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))


class Page(HTMLParser):
    """A document as its reader has it: pieces of text in their order, table cells, links by their words."""

    HIDDEN = ("title", "script", "style", "noscript")

    def __init__(self, document: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.cells: list[str] = []
        self.links: dict[str, str] = {}
        self._open: list[tuple[str, str]] = []  # of the tags that matter here: name and href
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in (*self.HIDDEN, "td", "a"):
            self._open.append((tag, dict(attrs).get("href") or ""))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        tag, href = self._open[-1] if self._open else ("", "")
        if not text or tag in self.HIDDEN:
            return
        self.texts.append(text)
        if tag == "td":
            self.cells.append(text)
        if tag == "a":
            self.links[text] = href

    def pairs(self) -> set[tuple[str, str]]:
        """Return every two neighbouring texts: a name and its value in MLflow's lists of parameters and metrics."""
        return set(pairwise(self.texts))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    folder = tmp_path_factory.mktemp("browser")
    flags = [*BROWSER_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    # It hears its commands on descriptor 3 and answers on 4.
    shell = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null']
    with running([*shell, CHROMIUM, *flags], folder, folder / "log", talking=True) as program:
        yield Browser(program)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("a folder with spaces")
    words = ["-m", "accum_steps=1,2", "lr=0.02,1e20", "steps=3", "device=cpu"]
    command = [sys.executable, "-m", "accum_sweep", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr  # lr=1e20 diverges
    told = re.search(r"in MLflow: (.+?) +then open (http://127\.0\.0\.1:5000/#\S+)", done.stderr)
    assert told is not None, done.stderr
    assert told[1] == "mlflow ui"
    runs = {record.name: record for record in records(folder / "runs")}
    assert len(runs) == 4
    port = free_port()
    ui = [str(Path(sysconfig.get_path("scripts"), "mlflow")), "ui", "--port", str(port)]
    log = tmp_path_factory.mktemp("server") / "log"
    with running(ui, folder, log, {**os.environ, **QUICK_START}) as server:
        root = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{root}/health", server, log)
        parent_id = told[2].partition("?")[0].rpartition("/")[2]
        parent = json.loads(fetch(f"{root}/api/2.0/mlflow/runs/get?run_id={parent_id}"))
        yield Site(told[2].replace(":5000/", f":{port}/"), parent["run"]["info"]["run_name"], done.stdout, runs)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_the_experiment_page_shows_the_sweep_and_its_runs_by_what_differs(browser: Browser, site: Site) -> None:
    page, _, query = site.parent_address.partition("?")
    experiment = f"{page.rpartition('/')[0]}?{query}"
    # Sorted by a parameter, MLflow lists the runs one below the other; else they are folded under the sweep.
    everything = f"{experiment}&orderByKey=params.%60accum_steps%60&orderByAsc=true"
    folded, listed = browser.look(experiment, site.parent_name), browser.look(everything, site.parent_name, *site.runs)
    assert site.parent_name in folded.texts
    assert not site.runs.keys() & set(folded.texts)
    assert {site.parent_name, *site.runs} <= set(listed.texts)


def test_the_sweeps_page_shows_the_printed_table_and_leads_to_its_runs(browser: Browser, site: Site) -> None:
    table = [re.split(r" {2,}", line.strip()) for line in site.printed.split("\n\n")[1].splitlines()[2:]]
    assert len(table) == len(site.runs)
    cells = {cell for row in table for cell in row}
    page = browser.look(site.parent_address, site.parent_name, *site.runs, *cells)
    assert site.parent_name in page.texts
    assert page.links.keys() >= site.runs.keys()
    for row in table:
        assert len(row) > 3
        assert set(row) <= set(page.cells)


@pytest.mark.parametrize("lr", [0.02, 1e20])
def test_a_runs_pages_show_its_parameters_metrics_and_curves_and_why_it_did_not_finish(
    browser: Browser, site: Site, lr: float
) -> None:
    ((name, record),) = [(n, r) for n, r in site.runs.items() if (r.config["accum_steps"], r.config["lr"]) == (2, lr)]
    link = browser.look(site.parent_address, name).links[name]
    address = site.parent_address.partition("#")[0] + link[link.index("#") :]
    page = browser.look(address, name, site.parent_name, "accum_steps", "first_loss")
    assert name in page.texts
    assert page.links.keys() >= {site.parent_name}
    shown = page.pairs()
    assert {("accum_steps", "2"), ("micro_batch_size", "2"), ("effective_batch_size", "4")} <= shown
    assert ("first_loss", str(record.metrics["first_loss"])) in shown
    if record.status == "finished":
        assert ("last_loss", str(record.metrics["last_loss"])) in shown
    else:
        assert record.reason is not None
        assert any(record.reason in text for text in page.texts)
    path, _, query = address.partition("?")
    curves = {f"{name} ({series})" for series in record.series}  # the charts' legends
    assert len(curves) == 4
    # A single value that is not finite would take all four charts away.
    assert curves <= set(browser.look(f"{path}/model-metrics?{query}", *curves).texts)


def test_the_address_of_a_run_that_is_not_there_shows_none_of_this(browser: Browser, site: Site) -> None:
    wrong = re.sub(r"(?<=/runs/)\w+", NO_RUN, site.parent_address)
    page = browser.look(wrong, f"Run ID {NO_RUN} does not exist, go back to")
    assert any(NO_RUN in text for text in page.texts), "the page itself has come"
    assert not page.cells
    assert not {site.parent_name, *site.runs, "accum_steps", "first_loss"} & set(page.texts)


@contextlib.contextmanager
def running(
    command: list[str], folder: Path, log: Path, environment: Mapping[str, str] = os.environ, talking: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a process group of its own; end the whole group, whatever happens.

    What it says goes to `log`; `talking` leaves standard input and output to the caller.
    """
    with log.open("wb") as file:
        ends = (subprocess.PIPE, subprocess.PIPE) if talking else (subprocess.DEVNULL, file)
        program = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=ends[0], stdout=ends[1], stderr=file, start_new_session=True
        )
    with program:
        try:
            yield program
        finally:
            for order in (signal.SIGTERM, signal.SIGKILL):  # asked first, it ends its own children properly
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(program.pid, order)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(timeout=10)


def wait_until_ready(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            fetch(address)
            return
        time.sleep(0.2)
    pytest.fail(f"mlflow ui did not become ready:\n{log.read_text(errors='replace')}")


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return bytes(answer.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
