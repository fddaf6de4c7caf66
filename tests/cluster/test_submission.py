"""Submitting to a dashboard that answers, but whose cluster has no agent yet: a local HTTP server of Ray's job routes."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

ray = pytest.importorskip("ray")

from ray.job_submission import JobSubmissionClient  # noqa: E402

from aarlib.runtime import jobs  # noqa: E402


class Dashboard(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.refusals: list[str] = []
        self.asked = 0


class Routes(BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        self._reply(200, {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": "x"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1
        if self.server.refusals:
            self._reply(500, self.server.refusals.pop())
        else:
            self._reply(200, {"submission_id": "raysubmit_1", "job_id": "raysubmit_1"})

    def _reply(self, status: int, answer: object) -> None:
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    monkeypatch.setattr(jobs, "AGENT_POLL_S", 0.01)
    with Dashboard() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def submit(dashboard: Dashboard) -> tuple[str, list[str]]:
    shown: list[str] = []
    client = JobSubmissionClient(f"http://127.0.0.1:{dashboard.server_port}")
    return jobs._submitted(client, "python -V", {}, shown.append), shown


def test_a_head_without_an_agent_is_asked_again(dashboard: Dashboard) -> None:
    dashboard.refusals = [f"{jobs.NO_AGENT}, please try again later."] * 2
    job, shown = submit(dashboard)
    assert job == "raysubmit_1"
    assert dashboard.asked == 3 and len(shown) == 2 and "takes no jobs yet" in shown[0]


def test_other_refusals_and_a_wait_that_is_over_are_raised(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard.refusals = ["the entrypoint is bad"]
    with pytest.raises(RuntimeError, match="the entrypoint is bad"):
        submit(dashboard)
    monkeypatch.setattr(jobs, "AGENT_WAIT_S", -1.0)
    dashboard.refusals = [jobs.NO_AGENT]
    with pytest.raises(RuntimeError, match=jobs.NO_AGENT):
        submit(dashboard)
    assert dashboard.asked == 2
