"""`prism explore` in headless Chromium: five states, time to an answer, random settings.

Run from a checkout: python experiments/verification/explore.py [--job llama3-405b-16k]
[--settings 50] [--changes 15] [--pictures FOLDER]; with --picture FILE only the one of
docs/explore.md: two settings side by side, as prism/present/explore/page.py shows them.
Needs playwright, a Chromium (--browser names its file) and the extra `app`; without them it says so
and stops. Fails where a page asks for anything outside this machine, a setting ends in an error
page, or the median time from a change to its first answer is above 1.5 s.
"""

import argparse
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
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
        if refused:  # and so would be all that follow
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
            took = time_changes(explorer, arguments.changes)
            tried = try_settings(explorer, arguments.settings)
        finally:
            status, said = explorer.close()
    median = statistics.median(took)
    print(f"from a change to its first answer: median {median:.2f} s, longest {max(took):.2f} s")
    print(f"{arguments.settings} random settings: {tried}; no error page")
    outside = {at for at in explorer.asked if not at.startswith(("http://127.0.0.1", "data:"))}
    print(f"asked of: {sorted(explorer.asked)}; ended with status {status} {said!r}")
    return int(median > MOST_S or bool(outside) or status != 0)


if __name__ == "__main__":
    sys.exit(main())
