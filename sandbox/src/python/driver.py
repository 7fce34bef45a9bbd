"""A Python that keeps its state between runs: what `Sandbox::python` starts. It is compiled under the name `<sandvmm>`.

Requests come on the standard input that it is started with, frames go to that standard output; both are moved out of the
way, so that code finds an empty standard input, and pipes whose other ends are here. A frame is a little-endian 32-bit
length, a byte that says what it is, and that many bytes: `O` and `E` output and error as they are; `D` something that was
displayed, `V` the value of the last expression, each as JSON of representations by MIME type; `X` an exception; `.` the
end of a run; `C` whether code is complete. A request is a length and JSON.
"""

import ast
import base64
import codeop
import fcntl
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import select
import signal
import sys
import threading
import time
import traceback
import types

# Longest text and largest representation, in characters and bytes; a longer text is cut, a larger representation is left out.
MAX_TEXT_CHARS = 1 << 20
MAX_REPRESENTATION_BYTES = 8 << 20
# All representations of one value, in bytes as they are sent; those that have no room are left out. The host takes 64 MiB at once.
MAX_SHOWN_BYTES = 60 << 20
# How long an interrupt may be on its way, in seconds: it comes by another way than the runs.
LATE_INTERRUPT_S = 2
# Exceptions of a chain whose tracebacks are cleaned.
MAX_CHAIN = 64
# Bytes of output that are read at one time.
CHUNK_BYTES = 1 << 16
# Our own descriptors are moved up to here, so that a script's first one is 3.
FIRST_HIGH_DESCRIPTOR = 900
# How an object says what it looks like, and as what.
METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
}
# The module that matplotlib draws with.
BACKEND = "sandvmm_inline"


def move_up(descriptor):
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH_DESCRIPTOR)


class Link:
    """The streams to the host, and the code's output on its way there."""

    def __init__(self):
        self.requests, self.frames = move_up(0), move_up(1)
        self.owner = os.getpid()
        self.lock = threading.Lock()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self.pipes = {}
        for kind, descriptor in ((b"O", 1), (b"E", 2)):
            ours, theirs = os.pipe()
            os.dup2(theirs, descriptor)
            os.close(theirs)
            high = move_up(ours)
            os.close(ours)
            os.set_blocking(high, False)
            self.pipes[high] = kind
        threading.Thread(target=self.carry, name="sandvmm output", daemon=True).start()

    def carry(self):
        waiting = select.poll()
        for pipe in self.pipes:
            waiting.register(pipe, select.POLLIN)
        while True:
            waiting.poll()
            self.drain()

    def drain(self):
        """Sends all that was written up to now. What is read is sent before anybody else reads."""
        with self.lock:
            for pipe, kind in self.pipes.items():
                while True:
                    try:
                        data = os.read(pipe, CHUNK_BYTES)
                    except BlockingIOError:
                        break
                    if not data:
                        break
                    self.write(kind, data)

    def send(self, kind, data):
        with self.lock:
            self.write(kind, data)

    def write(self, kind, data):
        rest = memoryview(len(data).to_bytes(4, "little") + kind + data)
        while rest:
            rest = rest[os.write(self.frames, rest) :]

    def receive(self):
        """The next request, or None at their end."""
        length = self.read(4)
        return length and json.loads(self.read(int.from_bytes(length, "little")))

    def read(self, count):
        data = bytearray()
        while len(data) < count:
            piece = os.read(self.requests, count - len(data))
            if not piece:
                return None
            data += piece
        return bytes(data)


class Interrupts:
    """An interrupt is for code that runs. One that comes while a frame is on its way waits for the frame."""

    def __init__(self):
        self.is_running = self.is_held = self.has_come = False
        self.count = 0
        signal.signal(signal.SIGINT, self.come)

    def catch_up(self, sent):
        """Waits until those that were sent for earlier runs have come; several may have become one."""
        until = time.monotonic() + LATE_INTERRUPT_S
        while self.count < sent and time.monotonic() < until:
            time.sleep(0.001)
        self.count = sent

    def come(self, *_):
        self.count += 1
        if self.is_held:
            self.has_come = True
        elif self.is_running:
            raise KeyboardInterrupt

    def hold(self, work, *args):
        if not self.is_running or threading.current_thread() is not threading.main_thread():
            return work(*args)
        self.is_held = True
        try:
            return work(*args)
        finally:
            self.is_held = False
            if self.has_come and self.is_running:
                self.has_come = False
                raise KeyboardInterrupt


def representations(value):
    """What `value` looks like, by MIME type: text, or bytes as {"base64": …}."""
    found = {}
    bundle = getattr(value, "_repr_mimebundle_", None)
    if callable(bundle) and not isinstance(value, type):
        made = bundle()
        found.update(made[0] if isinstance(made, tuple) else made or {})
    for method, mime in METHODS.items():
        made = getattr(value, method, None) if not isinstance(value, type) else None
        if callable(made) and mime not in found:
            made = made()
            made = made[0] if isinstance(made, tuple) else made
            if made is not None:
                found[mime] = made
    found.setdefault("text/plain", repr(value))
    return found


def within_bounds(found):
    """What of the representations of a value is sent, the text before all others."""
    kept, left = {}, MAX_SHOWN_BYTES
    for mime, made in sorted(found.items(), key=lambda one: one[0] != "text/plain"):
        mime, made = unicode(str(mime)), encoded(mime, made)
        size = len(json.dumps({mime: made}))
        if made is not None and size <= left:
            kept[mime], left = made, left - size
    return kept


def encoded(mime, made):
    """As it is sent; None where it is too large."""
    if isinstance(made, (bytes, bytearray, memoryview)):
        made = bytes(made)
        return {"base64": base64.b64encode(made).decode()} if len(made) <= MAX_REPRESENTATION_BYTES else None
    if not isinstance(made, str):
        made = json.dumps(made)
    if mime == "text/plain":
        return cut(made)
    made = unicode(made)
    return made if len(made.encode()) <= MAX_REPRESENTATION_BYTES else None


def unicode(text):
    """Without the halves of characters that Python's strings may have."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut(text):
    text = unicode(text[: MAX_TEXT_CHARS + 1])
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"


class Backend(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Has matplotlib, once it is imported, draw figures for the host; the variable that tells it is gone afterwards, so that
    other processes are not told."""

    def __init__(self, show):
        self.show = show

    def find_spec(self, name, path, target=None):
        if name == BACKEND:
            return importlib.util.spec_from_loader(name, self)
        if name == "matplotlib" and "MPLBACKEND" not in os.environ:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = Told(spec.loader)
            return spec
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        from matplotlib.backend_bases import FigureManagerBase
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        module.FigureCanvas, module.FigureManager = FigureCanvasAgg, FigureManagerBase
        module.show = self.show


class Told:
    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def exec_module(self, module):
        os.environ["MPLBACKEND"] = f"module://{BACKEND}"
        try:
            self.loader.exec_module(module)
        finally:
            os.environ.pop("MPLBACKEND", None)


class Context:
    """The state that stays, and the runs that change it."""

    def __init__(self, link):
        self.link, self.interrupts, self.count = link, Interrupts(), 0
        self.main = types.ModuleType("__main__")
        self.main.__builtins__ = __builtins__
        self.main.display = self.display
        sys.modules["__main__"] = self.main
        self.compiler = codeop.Compile()
        sys.argv, sys.path[0] = [""], ""
        sys.meta_path.insert(0, Backend(self.show_figures))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
        if "matplotlib" in sys.modules and "MPLBACKEND" not in os.environ:
            sys.modules["matplotlib"].use(f"module://{BACKEND}")

    def serve(self):
        self.link.send(b".", b"{}")
        while (request := self.link.receive()) is not None:
            if "complete" in request:
                self.link.send(b"C", self.completeness(request["complete"]))
            else:
                self.interrupts.catch_up(request["run"]["interrupts"])
                self.run(request["run"]["code"])
                self.link.send(b".", b"{}")

    def completeness(self, code):
        try:
            return b"1" if codeop.compile_command(code, "<code>", "single") is not None else b"0"
        except (SyntaxError, ValueError, OverflowError):
            return b"1"

    def run(self, code):
        self.count += 1
        name = f"<run {self.count}>"
        linecache.cache[name] = len(code), None, code.splitlines(True), name
        failure = None
        if sys.stdin is None or sys.stdin.closed:
            sys.stdin = open(0, closefd=False)
        try:
            self.interrupts.has_come, self.interrupts.is_running = False, True
            try:
                self.evaluate(code, name)
                self.show_figures()
            finally:
                self.interrupts.is_running = False
        except BaseException as error:
            failure = error
        # A forked process that code has let come here is none of the host's.
        if os.getpid() != self.link.owner:
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        self.link.drain()
        if failure is not None:
            self.tell(failure)

    def evaluate(self, code, name):
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        namespace = self.main.__dict__
        if tree.body:
            exec(self.compiler(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(self.compiler(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                self.display_as(b"V", value)

    def display(self, *values):
        """Shows values as the last expression of a run is shown."""
        for value in values:
            self.display_as(b"D", value)

    def display_as(self, kind, value):
        self.show(kind, representations(value))

    def show(self, kind, found):
        # What was printed before comes before.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.interrupts.hold(self.link.drain)
        self.interrupts.hold(self.link.send, kind, json.dumps(within_bounds(found)).encode())

    def show_figures(self, *args, **kwargs):
        """Displays and closes all figures that are open."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            image = io.BytesIO()
            figure.savefig(image, format="png", bbox_inches="tight")
            self.show(b"D", {"image/png": image.getvalue(), "text/plain": repr(figure)})
            pyplot.close(figure)

    def tell(self, error):
        # From the code's own first line on; a syntax error has none.
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<run "):
            trace = trace.tb_next
        try:
            value = str(error)
        except Exception:
            value = "<exception str() failed>"
        try:
            lines = own_lines(traceback.TracebackException(type(error), error, trace)).format()
        except Exception as second:
            lines = [f"The traceback can't be shown: {type(second).__name__}\n"]
        told = {"name": type(error).__name__, "value": value, "traceback": "".join(lines)}
        self.link.send(b"X", json.dumps({name: cut(text) for name, text in told.items()}).encode())


def own_lines(trace, depth=0):
    """A traceback without the lines of this file, such as that in which an interrupt arrived."""
    trace.stack[:] = [frame for frame in trace.stack if frame.filename != "<sandvmm>"]
    for other in (trace.__cause__, trace.__context__):
        if other is not None and depth < MAX_CHAIN:
            own_lines(other, depth + 1)
    return trace


def main():
    Context(Link()).serve()


main()
