"""A warm interpreter: an ordinary python3 that has run some code, and is forked for later runs of python3.

It is started as `python3 FILE CODE`, as the user of those runs, with a sequenced-packet socket to the agent as its
standard input. It runs CODE, then has one forked process in reserve, a *spare*, and tells the agent its number.
A spare waits for one order on the same socket, becomes what `python3 ARGUMENTS` would be, and says so on a socket that
came with the order; or it says that it does not fit, and the agent starts python3 anew.

How a script is run without a trace of this file below it: a spare is forked by a thread whose whole work is a chain of
C functions (`deque.extend` of `starmap` of `operator.call`), fed by the generator `life`. In the forked process that
thread is the main thread. When the generator yields CPython's own `PyRun_AnyFileExFlags`, the chain calls it while no
Python function is on the stack: the script's module frame is the outermost, and CPython itself compiles, runs, prints
the traceback and exits, as for any script.
"""

import os
import sys

before = set(sys.modules)

import _collections
import _operator
import _socket
import _thread
import atexit
import ctypes
import gc
import io
import itertools
import posix
import time

# Who imports one of these in a script gets it as if it were the first time.
for name in set(sys.modules) - before:
    del sys.modules[name]

# The versions of CPython for which the comparison with a real python3 was made (guest-agent/tests/warm.rs).
KNOWN_VERSIONS = {(3, 11)}

# Longest order, in bytes: MAX_WARM_ORDER_BYTES of the agent.
MAX_ORDER_BYTES = 65536
# Most descriptors that come with an order: the report's socket and three streams.
MAX_DESCRIPTORS = 4
# Our own descriptors are moved up to here, so that a script's first one is 3.
FIRST_HIGH_DESCRIPTOR = 900
# Spares that may end before they can take an order, one after the other, since the guest has no room; and the pause between two.
# Then the agent is told by the server's end.
MAX_FAILED_SPARES = 10
FAILED_SPARE_PAUSE_S = 0.02

# What a spare says, as frames of the agent's `stage::Report`.
READY = b"\1\0\0\0\0"
UNFIT = b"\1\0\0\0\2"

# Variables that python3, its libraries or the C library read when they start. Where one of them is not as it was for
# this process, a forked process would not be what a new one is.
SENSITIVE = (
    b"PYTHON", b"LD_", b"LC_", b"LANG", b"PATH", b"HOME", b"MALLOC_", b"GLIBC_", b"GCONV_", b"LOCPATH", b"OPENSSL_",
    b"SSL_", b"OMP_", b"GOMP_", b"KMP_", b"OPENBLAS_", b"GOTO_", b"MKL_", b"BLIS_", b"NPY_", b"NUMPY_", b"NUMEXPR_",
    b"NUMBA_", b"TORCH_", b"CUDA_", b"MPLCONFIGDIR", b"MPLBACKEND", b"XDG_",
)
# Variables that every command has, whatever it asks for.
DEFAULTS = (b"PATH", b"HOME", b"USER", b"LOGNAME", b"SHELL", b"LANG")

# prctl(2)
PR_SET_DUMPABLE = 4
# `asm-generic/ioctls.h`
TIOCSCTTY = 0x540E
# inode(7)
S_IFMT, S_IFREG = 0o170000, 0o100000
# PyCF_IGNORE_COOKIE (`Include/cpython/compile.h`): what -c gives is text already.
IGNORE_COOKIE = 0x0800
# C calls below a script that python3 has not: each counts towards the recursion limit.
EXTRA_DEPTH = 3

api, libc = ctypes.pythonapi, ctypes.CDLL(None)


class CompilerFlags(ctypes.Structure):
    """`PyCompilerFlags` (`Include/cpython/compile.h`)."""

    _fields_ = [("flags", ctypes.c_int), ("feature_version", ctypes.c_int)]


def function(library, name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


fopen = function(libc, "fopen", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
run_file = function(
    api, "PyRun_AnyFileExFlags", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p
)
run_text = function(api, "PyRun_SimpleStringFlags", ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
get_importer = function(api, "PyImport_GetImporter", ctypes.py_object, ctypes.py_object)
leave_call = function(api, "Py_LeaveRecursiveCall", None)
exit_python = function(api, "Py_Exit", None, ctypes.c_int)
exit_process = function(libc, "exit", None, ctypes.c_int)
on_exit = function(libc, "on_exit", ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
raise_signal = ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p)
c_stdin = ctypes.c_void_p.in_dll(libc, "stdin")
Module = type(sys)


class Unfit(Exception):
    """An order that a forked process can't follow to the letter."""


class Order:
    """What a spare is to be. Numbers are 32 bits, little-endian; a text is its length and its bytes."""

    def __init__(self, data):
        self.data, self.place = data, 0
        self.addressee = self.number()
        self.is_terminal, self.has_stdin, self.has_folder, self.has_file = (bool(byte) for byte in self.take(4))
        self.program = self.text()
        self.arguments = [self.text() for _ in range(self.number())]
        self.variables = {self.text(): self.text() for _ in range(self.number())}
        self.folder = self.text() if self.has_folder else None
        self.file = (self.text(), self.number(), self.text()) if self.has_file else None

    def take(self, count):
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self):
        return int.from_bytes(self.take(4), "little")

    def text(self):
        return bytes(self.take(self.number()))


def site_state():
    """What decides which folders python3 finds modules in when it starts."""
    site = sys.modules.get("site")
    folders = [*site.getsitepackages(), site.getusersitepackages()] if site else []
    state = []
    for folder in folders:
        try:
            state.append((folder, os.stat(folder).st_mtime_ns))
        except OSError:
            state.append((folder, None))
    return state


class Server:
    """What all spares share."""

    def __init__(self, agent):
        self.agent = agent
        self.environment = dict(os.environb)
        self.site_state = site_state()
        self.encoding, self.errors = sys.stdin.encoding, sys.stdin.errors

    def run(self):
        """Makes a spare at first and whenever the agent asks for one: in a machine with one run, a second would be in vain."""
        failed = 0
        while failed < MAX_FAILED_SPARES:
            ours, theirs = os.pipe()
            chain = itertools.starmap(_operator.call, self.life(ours, theirs))
            self.results = _collections.deque(maxlen=1)
            _thread.start_new_thread(self.results.extend, (chain,))
            number = os.read(ours, 4)
            if len(number) != 4:
                failed += 1
                os.close(ours)
                time.sleep(FAILED_SPARE_PAUSE_S)
                continue
            failed = 0
            self.agent.send(number)
            # Ends when the spare has its order, or is no more.
            os.read(ours, 1)
            os.close(ours)
            # A request, or the order for a spare that is no more.
            request, descriptors = receive(self.agent)
            for descriptor in descriptors:
                os.close(descriptor)
            if not request:
                return

    def life(self, ours, theirs):
        """A spare, in the thread that will be its main thread."""
        middle = os.fork()
        if middle:
            os.close(theirs)
            os.waitpid(middle, 0)
            return
        # Its parent is to be the agent, as it is of every command: that of a process whose own has ended.
        middle = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == middle:
            time.sleep(0)
        os.close(ours)
        os.setsid()
        try:
            self.rehearse()
        except Exception:
            # An order that needs the same will not fit.
            pass
        os.write(theirs, os.getpid().to_bytes(4, "little"))
        order, (report, *streams) = next_order(self.agent)
        os.close(theirs)
        self.agent.close()
        try:
            run = self.become(order, streams)
        except Exception:
            os.write(report, UNFIT)
            os._exit(0)
        os.write(report, READY)
        os.close(report)
        del order, streams, report
        for _ in range(EXTRA_DEPTH):
            leave_call()
        yield run
        status = 1 if self.results[0] else 0
        if status and getattr(sys, "last_type", None) is KeyboardInterrupt:
            # As python3 does: after all else, the signal itself ends the process. exit(3) calls raise(2).
            on_exit(raise_signal, None)
            status = 2
        else:
            known_status.append(status)
        yield exit_python, status

    def rehearse(self):
        """Does once, for nothing, what an order will need: pages that are shared with the server are copied now, and not
        when somebody waits."""
        number = (0).to_bytes(4, "little")
        order = Order(number + bytes(4) + number * 3)
        environment = self.environment_for(order)
        site_state()
        set_environment(environment)
        null = os.open("/dev/null", os.O_RDWR)
        connect(order, [os.dup(null), null])
        flags = CompilerFlags(0, sys.version_info.minor)
        run_text(b"print('x')", ctypes.addressof(flags))
        prepare(order, ["-c", "pass"])
        self.open_streams()
        reseed()
        # Their ends are counted in their pages.
        list(sys.modules.values())

    def become(self, order, streams):
        """Makes this process what a new python3 would be, and returns the call that runs it."""
        environment = self.environment_for(order)
        if site_state() != self.site_state:
            raise Unfit
        if order.file:
            write_file(*order.file, environment)
        enter_folder(order.folder, environment)
        connect(order, streams)
        set_environment(environment)
        arguments = [os.fsdecode(argument) for argument in order.arguments]
        sys.orig_argv = [os.fsdecode(order.program), *arguments]
        run = prepare(order, arguments)
        self.open_streams()
        reseed()
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        if order.is_terminal:
            # Last: a terminal dies with the session that holds it.
            if libc.ioctl(0, TIOCSCTTY, 0):
                raise Unfit
        return run

    def environment_for(self, order):
        """The defaults, and what was asked for, in the order that a new process finds them in."""
        environment = {name: self.environment[name] for name in DEFAULTS if name in self.environment}
        if order.is_terminal:
            environment[b"TERM"] = b"xterm-256color"
        environment.update(order.variables)
        for name in {*environment, *self.environment}:
            if name.startswith(SENSITIVE) and environment.get(name) != self.environment.get(name):
                raise Unfit
            if not name or b"=" in name:
                raise Unfit
        return dict(sorted(environment.items()))

    def open_streams(self):
        """As `create_stdio` in `Python/pylifecycle.c`."""
        for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
            mode = "w" if descriptor else "r"
            buffered = io.open(descriptor, mode + "b", -1, None, None, None, False)
            buffered.raw.name = f"<{name}>"
            by_lines = descriptor == 2 or buffered.raw.isatty()
            errors = "backslashreplace" if descriptor == 2 else self.errors
            text = io.TextIOWrapper(buffered, self.encoding, errors, "\n", by_lines)
            text.mode = mode
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)


def next_order(socket):
    """The order for this process. One for a spare that was killed before it could take it is dropped with its streams, upon
    which the agent starts that command anew."""
    while True:
        data, descriptors = receive(socket)
        if not data:
            os._exit(0)
        order = Order(data)
        if order.addressee == os.getpid() and descriptors:
            return order, descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def receive(socket):
    """One order and its descriptors, moved up, which the script must not find."""
    data, ancillary, _, _ = socket.recvmsg(
        MAX_ORDER_BYTES, _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), _socket.MSG_CMSG_CLOEXEC
    )
    descriptors = []
    for level, kind, content in ancillary:
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
            for place in range(0, len(content) - len(content) % 4, 4):
                low = int.from_bytes(content[place : place + 4], sys.byteorder)
                descriptors.append(move_up(low, FIRST_HIGH_DESCRIPTOR + 10 + len(descriptors)))
    return data, descriptors


def move_up(low, high):
    os.dup2(low, high, inheritable=False)
    os.close(low)
    return high


def connect(order, streams):
    """Gives the process its standard streams."""
    if not order.is_terminal and not order.has_stdin:
        null = os.open("/dev/null", os.O_RDONLY)
        streams = [move_up(null, FIRST_HIGH_DESCRIPTOR + 20), *streams]
    if order.is_terminal:
        streams = streams * 3
    if len(streams) != 3:
        raise Unfit
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    for stream in set(streams):
        os.close(stream)


def write_file(path, mode, content, environment):
    """The file that comes with a command, as the agent writes it: beside its place first. Why it can't be is explained by the agent's
    own way to start commands."""
    path = os.path.join(environment.get(b"HOME", b"/"), path)
    folder, name = os.path.split(path)
    if name in (b"", b".", b".."):
        raise Unfit
    os.makedirs(folder, exist_ok=True)
    beside = os.path.join(folder, b".sandvmm-%d" % os.getpid())
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    while content:
        content = content[os.write(file, content) :]
    os.fchmod(file, mode & 0o7777)
    os.close(file)
    os.rename(beside, path)


def enter_folder(folder, environment):
    """A folder that can't be entered is explained by the agent's own way to start commands."""
    if folder is not None:
        os.chdir(folder)
        return
    try:
        os.chdir(environment.get(b"HOME", b"/"))
    except OSError:
        os.chdir("/")


def set_environment(environment):
    """Both of them: Python's, and that of the C library."""
    libc.clearenv()
    for mapping in (os.environ._data, posix.environ):
        mapping.clear()
        mapping.update(environment)
    for name, value in environment.items():
        os.putenv(name, value)
    if b"TZ" in environment:
        time.tzset()


def prepare(order, arguments):
    """The module `__main__`, the arguments and the search path of this kind of run, and the call that runs it."""
    first = arguments[0] if arguments else ""
    flags = CompilerFlags(0, sys.version_info.minor)
    keep.append(flags)
    if first == "-c" and len(arguments) > 1:
        try:
            text = os.fsencode(arguments[1]).decode() + "\n"
        except UnicodeDecodeError:
            raise Unfit from None
        flags.flags = IGNORE_COOKIE
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        run = run_text, text.encode(), ctypes.addressof(flags)
    elif first in ("", "-"):
        if arguments and not first or os.isatty(0):
            raise Unfit
        sys.argv, sys.path[0] = arguments or [""], ""
        run = run_file, c_stdin.value, b"<stdin>", 0, ctypes.addressof(flags)
    elif first.startswith("-"):
        raise Unfit
    else:
        run = prepare_script(first, arguments, ctypes.addressof(flags))
    main = Module("__main__")
    main.__annotations__ = {}
    main.__builtins__ = sys.modules["builtins"]
    main.__loader__ = sys.modules["_frozen_importlib"].BuiltinImporter
    keep.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    return run


def prepare_script(name, arguments, flags):
    # As `config_run_filename_abspath` does: joined, and not otherwise changed.
    file = name
    if not file.startswith("/"):
        file = os.path.join(os.getcwd(), file)
    # A folder or an archive is a package, not a script.
    if get_importer(file) is not None:
        raise Unfit
    # Opening a pipe waits for its writer, which is no part of being prepared.
    if os.stat(file).st_mode & S_IFMT != S_IFREG:
        raise Unfit
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(name))
    stream = fopen(os.fsencode(file), b"rbe")
    if not stream:
        raise Unfit
    return run_file, stream, os.fsencode(file), 1, flags


# What C code still points to.
keep = []


def reseed():
    """Makes new what modules that are loaded keep of the one process that they were loaded in."""

    def loaded(name):
        return sys.modules.get(name)

    if module := loaded("random"):
        module.seed()
    if module := loaded("numpy.random"):
        module.seed()
    if module := loaded("_ssl"):
        module.RAND_add(os.urandom(32), 32.0)
    if module := loaded("tempfile"):
        module._name_sequence, module.tempdir = None, None
    if module := loaded("uuid"):
        module._node, module._last_timestamp = None, None
        # What libuuid has drawn for its node it keeps where nobody can reach it. There is no network address to ask for.
        module._generate_time_safe, module._GETTERS = None, []
    if module := loaded("platform"):
        module._uname_cache = None
    if module := loaded("logging"):
        module._startTime = time.time()
    if module := loaded("multiprocessing.process"):
        module.ORIGINAL_DIR = os.path.abspath(os.getcwd())
        current = module.current_process()
        current.authkey = os.urandom(32)


def spare_modules():
    """Keeps the modules that were there before the script from being taken apart at its end, object by object, in pages
    that would all have to be copied for that. The script's own are taken apart as ever.

    It was registered before anything else and is therefore called after everything else. Who calls all such functions
    by hand has a frame, and gets what python3 does.
    """
    if sys._getframe().f_back is not None:
        return
    for name, module in warm_modules.items():
        if name not in ("sys", "builtins", "__main__") and sys.modules.get(name) is module:
            keep.append(sys.modules.pop(name))
    if known_status and flushed():
        # The last of `sys` to go, after the standard streams, and `sys` goes when all objects of the script are gone
        # (`finalize_modules` in `Python/pylifecycle.c`).
        sys.__dict__["last"] = Last()


def flushed():
    """Whether the standard streams took everything. Where not, python3 has something to say about that."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        return False
    return True


class Last:
    """Ends the process before the interpreter itself is taken apart, which nobody could see."""

    def __del__(self):
        exit_process(known_status[0])


# The exit status, where it is known before the end.
known_status = []


# What the code that warms has loaded, and python3 itself.
warm_modules = {}


def warm_up(code):
    """Runs the code that warms; says whether it came to its end."""
    try:
        exec(compile(code, "<warm>", "exec"), {"__name__": "__warm__", "__builtins__": __builtins__})
    except SystemExit:
        print("The code that warms the interpreter has exited", file=sys.stderr)
        return False
    except BaseException as error:
        # From the code's own first line on.
        error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        return False
    if _thread._count():
        print("The code that warms the interpreter has left threads behind, which no fork has", file=sys.stderr)
        return False
    return True


def main():
    agent = _socket.socket(fileno=FIRST_HIGH_DESCRIPTOR)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    if sys.version_info[:2] not in KNOWN_VERSIONS:
        print(f"Python {sys.version_info.major}.{sys.version_info.minor} can't be kept warm", file=sys.stderr)
        sys.exit(1)
    server = Server(agent)
    atexit.register(spare_modules)
    if not warm_up(sys.argv[1]):
        sys.exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    # A folder that is removed would be in the way.
    os.chdir("/")
    # Nobody of the same user is to look into it or to take its socket.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    # What there is now is not looked at by any later collection, which would copy all of its pages.
    warm_modules.update(sys.modules)
    gc.collect()
    gc.freeze()
    server.run()


move_up(os.dup(0), FIRST_HIGH_DESCRIPTOR)
main()
