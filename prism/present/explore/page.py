"""The page: controls on the left, what prism answers on the right; one setting beside another.

A change of a control asks its question at once, and ends the one before; answers come stage by
stage. The page knows controls and answers, not what they mean.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError, option
from prism.jobs.job import Job, load_job
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.present.explore import controls
from prism.present.explore.computing import EndedError, Question, Stage, compute, warm_up
from prism.present.reports import html as reports

HOST = "127.0.0.1"
WAIT_MS = 150  # time without a key press after which a typed value counts [ms]
RECONNECT_S = 1800.0
"""Pause of a connection after which a page goes on, what was changed meanwhile included; after a
longer one it is drawn anew [s]."""
GRACE_S = 1  # time that open connections get to end, once the page is to [s]
HINTS = {
    "answer": "<p>Being computed.</p>",
    "ranking": "<p>Computed last.</p>",
    "unranked": "<p>No ranking: every op is on its own (variability.dependence: none).</p>",
    "beside": "<p>Pin as A keeps the present setting; what is changed then stands beside it as B, "
    "with what the difference is and how sure.</p>",
}
"""What stands where no answer is."""
OPEN = ("Model and cluster", "Layout")


def serve(base: Job, port: int, seed: int, threads: int | None, show: bool) -> None:
    """Serve the page to browsers of this machine until it is interrupted.

    Raises PrismError: the extra is not installed, or the port is taken.
    """
    try:
        from nicegui import app, ui
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ModuleNotFoundError as error:
        raise PrismError(
            "prism explore needs NiceGUI, which is not installed; pip install 'nicegui>=3.6'"
        ) from error
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise PrismError(
                f"{option('port')} {port}: {error.strerror}; is another page there? give another"
            ) from error
    app.add_middleware(SameOrigin)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all that was started ends
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    warm_up()

    @ui.page("/")
    async def index() -> None:
        client = ui.context.client
        await client.connected()  # what nobody looks at is not computed
        if client.has_socket_connection:  # else it was given up
            Page(app.storage.tab, base, seed, threads)

    try:
        ui.run(
            host=HOST, port=port, title=f"prism explore: {base.name}", show=show, dark=None,
            favicon="\N{TRIANGULAR RULER}", reload=False, show_welcome_message=False,
            uvicorn_logging_level="error", timeout_graceful_shutdown=GRACE_S,
            reconnect_timeout=RECONNECT_S,
        )  # fmt: skip
    except KeyboardInterrupt:
        pass  # that is how it ends


class SameOrigin:
    """Refuses what another site's page asks for in the browser; whose Host it is, others check."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""
        from starlette.responses import PlainTextResponse

        given = dict(scope.get("headers", ()))
        origin, host = given.get(b"origin"), given.get(b"host", b"")
        if origin is None or origin == b"http://" + host:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await PlainTextResponse("another origin", 403)(scope, receive, send)


@cache
def style() -> str:
    """Return the style of a report for the part of the page that shows answers."""
    css = Path(reports.__file__).with_name("templates") / "page.css"
    inner = css.read_text(encoding="utf-8").replace(":root {", "& {").replace("body {", "& {")
    return ".prism {" + inner + " & { margin: 0; max-width: none; padding: .5rem 1rem 3rem; } }"


class Page:
    """The page of one browser window.

    `kept` outlives a connection of the window: its job, what was changed and what is pinned. The
    values of `base` stand in the controls at first.
    """

    def __init__(
        self, kept: MutableMapping[str, Any], base: Job, seed: int, threads: int | None
    ) -> None:
        from nicegui import ui

        self.kept, self.seed, self.threads = kept, seed, threads
        self.base: Job = kept.get("base", base)
        self.changed = dict(kept.get("changed", {}))
        self.pinned: Any = kept.get("pinned")
        self.wrong: dict[str, str] = {}
        self.inputs: dict[str, Any] = {}
        self.result: Any = None
        self.computing: asyncio.Task[None] | None = None
        self.filling, self.answered = False, 0
        self.client = ui.context.client
        ui.add_css(style())
        drawer = ui.left_drawer(bordered=True)  # open where the screen has room for it
        with drawer.props("width=330 breakpoint=700"):
            self._draw_controls()
        with ui.column().classes("w-full gap-1"):
            self._draw_answers(drawer)
        self.refresh()
        self.client.on_connect(self.refresh)
        self.client.on_disconnect(self.leave)

    # ------------------------------------------------------------------------------- controls
    def _draw_controls(self) -> None:
        from nicegui import ui

        names = list(dict.fromkeys([self.base.source, *shipped_jobs()]))
        shipped = self.base.name if self.base.name in names else self.base.source
        names = [name for name in names if name == shipped or name in shipped_jobs()]
        self.start = ui.select(names, label="Start from", value=shipped, on_change=self._start)
        self.start.props("dense outlined").classes("w-full")
        values = controls.values_of(self.base) | self.changed
        for group, rows in controls.GROUPS.items():
            with ui.expansion(group, value=group in OPEN).classes("w-full").props("dense"):
                with ui.column().classes("w-full gap-2"):
                    for key, label in rows:
                        self.inputs[key] = self._draw_control(key, label, values[key])

    def _draw_control(self, key: str, label: str, value: Any) -> Any:
        from nicegui import ui

        element: Any
        found = controls.control(key)
        common: dict[str, Any] = {"label": label, "validation": lambda _: self.wrong.get(key)}

        def change(event: Any) -> None:
            self._change(key, event.value)

        if found.kind == "choice":
            choices = list(dict.fromkeys([*found.choices, *([] if value is None else [value])]))
            element = ui.select(choices, value=value, on_change=change, **common)
        elif found.kind == "switch":
            element = ui.switch(label, value=bool(value), on_change=change)
        elif found.kind == "text":
            text = "" if value is None else str(value)
            element = ui.input(value=text, on_change=change, **common)
        else:
            element = ui.number(value=value, on_change=change, **common)
        element.props(f'dense outlined hide-bottom-space debounce={WAIT_MS} data-key="{key}"')
        element.classes("w-full").mark(key)
        if found.help:
            element.tooltip(found.help)
        return element

    def _change(self, key: str, value: Any) -> None:
        if self.filling:
            return
        kind = controls.control(key).kind
        if kind == "count" and isinstance(value, float) and value.is_integer():
            value = int(value)
        value = None if value == "" else value
        self.changed = controls.change(self.base, self.changed, key, value)
        self.refresh()

    def _start(self, event: Any) -> None:
        """Start again from another job."""
        self.base, self.changed = load_job(event.value), {}
        self._fill(self.base)
        self.refresh()

    def _fill(self, job: Job) -> None:
        """Show what a job has in the controls that nobody changed: some of it follows."""
        self.filling = True
        for key, value in controls.values_of(job).items():
            element, kind = self.inputs[key], controls.control(key).kind
            empty = {"switch": False, "text": ""}.get(kind)
            shown = empty if value is None else str(value) if kind == "text" else value
            if key in self.changed or element.value == shown:
                continue
            if kind == "choice" and value is not None and value not in element.options:
                element.options.append(value)
            element.value = shown
            element.update()
        self.filling = False

    # -------------------------------------------------------------------------------- answers
    def _draw_answers(self, drawer: Any) -> None:
        from nicegui import ui

        with ui.row().classes("w-full items-center"):
            menu = ui.button(icon="menu", on_click=drawer.toggle).props("dense flat")
            menu.props('aria-label="controls"')
            self.busy = ui.spinner()
            self.state = ui.label("").mark("state")
            self.again = ui.button("Compute again", on_click=self.refresh).props("dense outline")
            ui.space()
            ui.button("Pin as A", on_click=lambda: self._pin(self.result)).props("dense outline")
            self.unpin = ui.button("Unpin", on_click=lambda: self._pin(None)).props("dense flat")
        self.faults = ui.html("", sanitize=False).classes("prism w-full").mark("faults")
        with ui.tabs().props("align=left dense").classes("w-full") as tabs:
            names = ("Answer", "Ranking", "A and B", "Job file")
            answer, ranking, beside, job = (ui.tab(name) for name in names)
        self.html = {}
        with ui.tab_panels(tabs, value=answer, animated=False).classes("w-full"):
            for name, tab in (("answer", answer), ("ranking", ranking), ("beside", beside)):
                with ui.tab_panel(tab).classes("q-pa-none"):
                    shown = ui.html(HINTS[name], sanitize=False).classes("prism w-full")
                    self.html[name] = shown.mark(name)
            with ui.tab_panel(job):
                ui.label("The commands that give the answer and the ranking:")
                self.command = ui.code("", language="bash").classes("w-full")
                ui.label("The job as a file:")
                self.file = ui.code("", language="yaml").classes("w-full")

    def leave(self) -> None:
        """End what is computed, unless another connection has taken the place of this one."""
        if self.computing is not None and not self.client.has_socket_connection:
            self.computing.cancel()

    def refresh(self) -> None:
        """Ask for what the controls say, or show beside them what is wrong."""
        self.kept.update(base=self.base, changed=self.changed, pinned=self.pinned)
        self.unpin.set_visibility(self.pinned is not None)
        if self.computing is not None:
            self.computing.cancel()
        try:
            job = controls.build(self.base, self.changed)
        except PrismError as error:
            self.refuse(str(error))
            return
        self._fill(job)
        self.show_faults({})
        self.html["beside"].set_content(HINTS["beside" if self.pinned is None else "answer"])
        together = job.variability.dependence != "none"
        self.html["ranking"].set_content(HINTS["ranking" if together else "unranked"])
        self.tell("starting", busy=True)
        self.computing = asyncio.get_running_loop().create_task(self._compute(job))

    async def _compute(self, job: Job) -> None:
        """Show the answers of a setting as they come."""
        begin, done = time.perf_counter(), []
        changed = controls.overrides(self.base, self.changed)
        try:
            async for told in compute(Question(job, self.seed, self.threads, self.pinned)):
                if isinstance(told, Stage):
                    self._show(told, job, changed)
                else:
                    done.append(told)
                    self.tell(f"computing: {told}", busy=True)
        except PrismError as error:
            self.refuse(str(error))
        except EndedError as ended:
            self.tell(f"the computing process ended before it was done ({ended}), as it does when "
                      "memory runs out", again=True)  # fmt: skip
        else:
            self.tell(f"done in {time.perf_counter() - begin:.1f} s: {', '.join(done)}")

    def _show(self, stage: Stage, job: Job, changed: dict[str, Any]) -> None:
        """Show an answer, and the commands whose figures it has."""
        self.html[stage.panel].set_content(stage.html)
        if stage.panel != "answer":
            return
        seed = ("--seed", str(self.seed))
        sample = ("--replicates", str(stage.replicates))
        commands = [controls.command("estimate", self.base, changed, *sample, *seed)]
        if job.variability.dependence != "none":
            commands.append(controls.command("rank", self.base, changed, *seed))
        self.command.set_content("\n".join(commands))
        self.file.set_content(controls.job_file(self.base, changed))
        self.result = stage.result
        self.answered += 1
        self.state.props(f"data-setting={self.answered}")

    def refuse(self, text: str) -> None:
        """Show messages, each beside the control that can correct it."""
        self.show_faults(controls.place_messages(text))
        self.tell("the answer below is of the setting before")

    def show_faults(self, faults: dict[str, list[str]]) -> None:
        """Mark controls, and list all that is wrong."""
        self.wrong = {key: "; ".join(found) for key, found in faults.items()}
        for element in self.inputs.values():
            if hasattr(element, "validate"):  # a switch has nothing to mark
                element.validate()
        lines = tuple(line for found in faults.values() for line in found)
        self.faults.set_content(reports.render_messages(lines, "This setting cannot be computed"))
        self.faults.set_visibility(bool(lines))

    def tell(self, text: str, busy: bool = False, again: bool = False) -> None:
        """Say what is being done, or that it is, and whether it can be done again."""
        self.state.set_text(text)
        self.busy.set_visibility(busy)
        self.again.set_visibility(again)

    def _pin(self, result: Any) -> None:
        """Keep a result as A; None: none any more."""
        self.pinned = result
        self.refresh()
