"""`prism explore` in headless Chromium: five states, time to an answer, random settings.

Run from a checkout: python experiments/checks/explore.py [--job llama3-405b-16k]
[--settings 50] [--changes 15] [--pauses 8 35] [--pictures FOLDER]; with --picture FILE only that of
docs/explore.md: two settings side by side, as prism/present/explore/page.py shows them.
Needs playwright, a Chromium (--browser names its file) and the extra `app`; without them it says so
and stops. Fails where a page asks for anything outside this machine, a setting ends in an error
page, the median time from a change to its first answer is above 1.5 s, a change that is made while
the connection is cut does not arrive, or another site's request is answered.
"""

import argparse
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

PORT = 8493
MOST_S = 1.5
ANSWERED = "document.querySelector('[data-setting]')?.dataset.setting"
STATE = "document.querySelector('.q-page-container').innerText"
VALUES = (1, 2, 4, 8, 16, 1, 2, 4, 8, 16, 0, 3, 100, 1024, 16384, -1, 0.5, 1e9)


class Explorer:
    """The page of a job in a browser."""

    def __init__(self, playwright, job, browser):
        command = [sys.executable, "-m", "prism", "explore", job, "--port", str(PORT),
                   "--no-browser", "-q"]  # fmt: skip
        self.server = subprocess.Popen(command, stderr=subprocess.PIPE)
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        self.page = chromium.new_page(viewport={"width": 1500, "height": 1000})
        self.asked, self.errors = set(), []
        self.page.on("request", lambda r: self.asked.add(re.sub(r"^(\w+:/*[^/]*).*", r"\1", r.url)))
        self.page.on("pageerror", lambda e: self.errors.append(str(e)))
        for _ in range(100):
            try:
                self.page.goto(f"http://127.0.0.1:{PORT}")
                break
            except Exception:  # not there yet
                time.sleep(0.2)
        self.wait(f"{ANSWERED} > 0", 120)

    def wait(self, what, timeout_s=60):
        """Wait until an expression of the page holds; the time that took [s]."""
        begin = time.perf_counter()
        self.page.wait_for_function(what, timeout=1e3 * timeout_s, polling=10)
        return time.perf_counter() - begin

    def open(self):
        """Open all groups of controls."""
        for group in ("Variability", "Run and failures"):
            if not self.page.locator(".q-expansion-item--expanded", has_text=group).count():
                self.page.get_by_text(group, exact=True).click()
        time.sleep(0.5)

    def give(self, key, value):
        """Type a value into a control."""
        self.page.fill(f'input[data-key="{key}"], [data-key="{key}"] input', f"{value:.10g}")

    def choose(self, key, name=None):
        """Choose an option of a control, any where no name is given."""
        self.page.locator(f'[data-key="{key}"]').first.click()
        options = self.page.locator(".q-menu .q-item")
        options.first.wait_for()
        if name is None:
            options.nth(random.randrange(options.count())).click()
        else:
            self.page.locator(".q-menu").get_by_text(name, exact=True).click()

    def close(self):
        """End the page as Ctrl-C does; its status and what it said."""
        self.server.send_signal(2)
        said = self.server.communicate(timeout=20)[1].decode()
        return self.server.returncode, said


class Line:
    """A connection to the page that can be cut."""

    PORT = PORT + 1

    def __init__(self):
        self.is_cut, self.open = False, []
        self.listening = socket.create_server(("127.0.0.1", self.PORT))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            ours = self.listening.accept()[0]
            if self.is_cut:
                ours.close()
                continue
            its = socket.create_connection(("127.0.0.1", PORT))
            self.open += [ours, its]
            for ends in ((ours, its), (its, ours)):
                threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:  # it was cut
            pass
        for end in (source, target):
            end.close()

    def cut(self, seconds):
        """Cut it for a time."""
        self.is_cut = True
        for end in self.open:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has ended
                pass
        self.open.clear()
        time.sleep(seconds)
        self.is_cut = False


def try_pauses(explorer, pauses):
    """Change the number of GPUs while the connection is cut; says whether each change arrives."""
    line, page, found = Line(), explorer.page, {}
    page.goto(f"http://127.0.0.1:{Line.PORT}")
    explorer.wait(f"{ANSWERED} > 0")
    gpus = int(page.locator('input[data-key="gpus"]').input_value())
    for i, pause in enumerate(pauses):
        explorer.wait(f"({STATE}).includes('done in')", 180)
        wanted, cutting = gpus // (2 - i % 2), threading.Thread(target=line.cut, args=(pause,))
        cutting.start()
        time.sleep(pause / 2)
        explorer.give("gpus", wanted)
        while cutting.is_alive():
            page.wait_for_timeout(100)
        explorer.wait(f"({STATE}).includes('computing')", 30)
        explorer.wait(f"({STATE}).includes('done in')", 180)
        page.reload()  # what the server has
        explorer.wait(f"{ANSWERED} > 0")
        found[pause] = int(page.locator('input[data-key="gpus"]').input_value()) == wanted
    return found


def ask_meanwhile(n, foreign):
    """Ask for the page n times, some from another site; statuses of own and of foreign requests."""
    own, others = set(), set()
    for i in range(n):
        of = others if i % (n // foreign) == 0 else own
        headers = {"Origin": "http://evil.example"} if of is others else {}
        request = urllib.request.Request(f"http://127.0.0.1:{PORT}", headers=headers)
        try:
            of.add(urllib.request.urlopen(request, timeout=10).status)
        except urllib.error.HTTPError as error:
            of.add(error.code)
    return own, others


def time_changes(explorer, n):
    """Time from a change of the number of GPUs, halved and back, to its first answer [s]."""
    gpus, out = int(explorer.page.locator('input[data-key="gpus"]').input_value()), []
    for i in range(n):
        before = explorer.page.evaluate(ANSWERED)
        explorer.give("gpus", gpus if i % 2 else gpus // 2)
        out.append(explorer.wait(f"{ANSWERED} != {before}"))
    return out


def try_settings(explorer, n):
    """Change n controls at random; how many were answered and how many refused."""
    explorer.open()
    found = {"answered": 0, "refused": 0}
    page = explorer.page
    for _ in range(n):
        before = page.evaluate(ANSWERED)
        keys = page.evaluate("[...document.querySelectorAll('[data-key]')].map(x=>x.dataset.key)")
        key = random.choice(sorted(set(keys)))
        field = page.locator(f'[data-key="{key}"]').first
        inside = field.locator("input")
        if page.locator(f'.q-select [data-key="{key}"], .q-select[data-key="{key}"]').count():
            explorer.choose(key)
        elif inside.count() or field.evaluate("x => x.tagName") == "INPUT":
            explorer.give(key, random.choice(VALUES))
        else:
            field.click()
        time.sleep(0.6)
        explorer.wait(f"{ANSWERED} != {before} || !({STATE}).includes('computing: step,')", 120)
        state = page.evaluate(STATE)
        if "ended before it was done" in state or explorer.errors:
            raise SystemExit(f"{key}: {state[:300]} {explorer.errors}")
        refused = "of the setting before" in state
        found["refused" if refused else "answered"] += 1
        if refused:  # and so would be all that follow: another window
            page.evaluate("sessionStorage.clear()")
            page.reload()
            explorer.wait(f"{ANSWERED} > 0")
            explorer.open()
    return found


def take_pictures(explorer, folder):
    """Save pictures of five states."""
    page = explorer.page

    def shoot(name):
        time.sleep(0.6)
        page.screenshot(path=folder / f"explore-{name}.png")

    explorer.wait(f"({STATE}).includes('done in')", 180)
    shoot("answer")
    page.get_by_role("tab", name="Ranking").click()
    shoot("ranking")
    page.get_by_role("button", name="Pin as A").click()
    before = page.evaluate(ANSWERED)
    explorer.give("parallelism.microbatches", 32)
    page.get_by_role("tab", name="A and B").click()
    explorer.wait(f"{ANSWERED} != {before}")
    explorer.wait(f"({STATE}).includes('ranking')", 60)
    shoot("beside")
    page.get_by_role("tab", name="Job file").click()
    shoot("file")
    explorer.give("parallelism.tp", 3)
    page.get_by_role("tab", name="Answer").click()
    explorer.wait(f"({STATE}).includes('of the setting before')")
    shoot("refused")
    explorer.give("parallelism.tp", 8)
    explorer.give("parallelism.microbatches", 16)
    page.get_by_role("button", name="Unpin").click()
    explorer.wait(f"({STATE}).includes('ranking')", 60)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", default="llama3-405b-16k")
    parser.add_argument("--settings", type=int, default=50)
    parser.add_argument("--changes", type=int, default=15)
    parser.add_argument("--pauses", type=float, nargs="*", default=[8, 35])
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--browser", default=shutil.which("chromium") or "")
    arguments = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("needs playwright: pip install playwright")
        return int(arguments.picture is not None)
    if not os.path.exists(arguments.browser):
        print("needs a Chromium: --browser FILE")
        return int(arguments.picture is not None)
    random.seed(1)
    begin = time.perf_counter()
    with sync_playwright() as playwright:
        explorer = Explorer(playwright, arguments.job, arguments.browser)
        print(f"{arguments.job}: first answer {time.perf_counter() - begin:.1f} s after the start")
        try:
            if arguments.pictures:
                take_pictures(explorer, arguments.pictures)
            if arguments.picture:
                with tempfile.TemporaryDirectory() as folder:
                    take_pictures(explorer, Path(folder))
                    shutil.copyfile(Path(folder) / "explore-beside.png", arguments.picture)
                return 0
            asked = []
            codes = threading.Thread(target=lambda: asked.extend(ask_meanwhile(500, 100)))
            codes.start()
            took = time_changes(explorer, arguments.changes)
            codes.join()
            arrived = try_pauses(explorer, arguments.pauses)
            tried = try_settings(explorer, arguments.settings)
        finally:
            status, said = explorer.close()
    median = statistics.median(took)
    print(f"from a change to its first answer: median {median:.2f} s, longest {max(took):.2f} s")
    print(f"{arguments.settings} random settings: {tried}; no error page")
    print(f"500 requests meanwhile: own {asked[0]}, of another site {asked[1]}")
    print(f"a change while the connection is cut arrives, by seconds: {arrived}")
    outside = {at for at in explorer.asked if not at.startswith(("http://127.0.0.1", "data:"))}
    print(f"asked of: {sorted(explorer.asked)}; ended with status {status} {said!r}")
    kept = asked == [{200}, {403}] and all(arrived.values())
    return int(median > MOST_S or bool(outside) or status != 0 or not kept)


if __name__ == "__main__":
    sys.exit(main())
