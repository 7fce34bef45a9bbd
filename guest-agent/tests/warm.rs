//! Runs of python3 that are forked from a warm interpreter, compared with runs that are started anew: the same agent
//! starts both, with real stages, servers and processes of this host.
//!
//! Needs `/usr/bin/python3` of a version that can be kept warm; without one there is nothing to compare.
#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "helpers of tests fail as tests do"
)]

mod warm_host;

use std::sync::MutexGuard;
use std::time::Instant;

use protocol::message::{ExitStatus, FromAgent, SpawnFailure, Stdio, TerminalSize, ToAgent};
use rustix::fs::{CWD, FileType, Mode};
use rustix::process::Signal;
use sandvmm_guest_agent::limits::WARM_START_WAIT;
use warm_host::{Host, Run, Seen};

/// Modules that keep something which no two forks may share, and something to tell whether they do.
const WARMING: &str = "\
import builtins, json, logging, multiprocessing, os, platform, random, ssl, tempfile, uuid
builtins.template = {
    'state': random.getstate(), 'key': bytes(multiprocessing.current_process().authkey),
    'name': tempfile.mktemp(), 'node': uuid.getnode(), 'uname': platform.uname(), 'start': logging._startTime,
}
def born():
    builtins.template['state'] = random.getstate()
os.register_at_fork(after_in_child=born)
";

/// What a script must not find as it was when the machine was saved. Prints what is as it was.
const RENEWED: &str = "\
import builtins, logging, multiprocessing, platform, random, tempfile, uuid
t = builtins.template
print([name for name, same in {
    'random': random.getstate() == t['state'],
    'authkey': bytes(multiprocessing.current_process().authkey) == t['key'],
    'tempfile': tempfile._name_sequence is not None,
    'uuid': uuid._node is not None,
    'platform': platform._uname_cache is not None,
    'logging': logging._startTime == t['start'],
}.items() if same])
";

/// A script that comes with its request.
const SENT: &str = "import os, sys
print(__file__, sys.argv, oct(os.stat(__file__).st_mode), os.listdir(os.path.dirname(__file__) or '.'))
raise ValueError('in the file')";

fn script(text: &str) -> Run {
    Run::new(&["script.py", "one", "two words"]).file("script.py", text)
}

fn code(text: &str) -> Run {
    Run::new(&["-c", text, "argument"])
}

/// Runs of which all that can be seen from outside must be the same.
fn runs() -> Vec<Run> {
    let mut runs: Vec<Run> = [
        "print('hello')",
        "",
        "1/0",
        "raise ValueError('ä', b'\\xff')",
        "def f(x):\n    return g(x)\ndef g(x):\n    assert x, 'no'\nf(0)",
        "try:\n    1/0\nexcept Exception as e:\n    raise KeyError(1) from e",
        "def f(n):\n    return f(n + 1)\nf(0)",
        "x = 'unfinished",
        "print('tab')\n\tprint('wrong')",
        "import sys; sys.exit()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(300)",
        "import sys; sys.exit('a sentence')",
        "raise SystemExit(True)",
        "raise KeyboardInterrupt",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(20)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(20)",
        "import os; os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "import faulthandler, os; faulthandler.enable(); os.abort()",
        "import sys; print(sys.argv, sys.orig_argv, sys.path, sys.executable, sys.prefix, sys.flags)",
        "import sys; print(__name__, __doc__, __package__, __spec__, list(globals()), __annotations__)\nx: int = 1",
        "'''doc'''\nfrom __future__ import annotations\ndef f(a: b): pass\nprint(__doc__, f.__annotations__)",
        "import sys; print(type(__loader__), __builtins__, sys.modules['__main__'].__dict__ is globals())",
        "import sys; print(sys._getframe().f_back, sys.getrecursionlimit(), sys.gettrace(), sys.warnoptions)",
        "import inspect, traceback; print(len(inspect.stack())); traceback.print_stack()",
        "import warnings; warnings.warn('w'); warnings.warn('x', DeprecationWarning); warnings.warn('y', stacklevel=3)",
        "import os; print(sorted(os.environ.items()), os.getcwd(), list(os.environ))",
        "import os; os.system('env; pwd; ulimit -a; cat /proc/self/oom_score_adj')",
        "import os; print(os.listdir('/proc/self/fd'), os.umask(0), os.getuid(), os.getgroups(), os.getpriority(0, 0))",
        "import os; print(os.getpid() == os.getpgid(0) == os.getsid(0), os.getppid() != 0)",
        "print(open('/proc/self/comm').read(), [l for l in open('/proc/self/status') if l[:3] in ('Cap', 'NoN', 'Uid', 'Gid', \
         'Gro', 'Cpu')], [int(l.split()[1], 16) & 0x7fffffff for l in open('/proc/self/status') if l[:4] in ('SigI', 'SigB', 'SigC')])",
        "import signal; print([signal.getsignal(s) for s in range(1, 32)], signal.pthread_sigmask(0, []))",
        "import sys\nfor f in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__):\n    print(f.name, f.mode, f.encoding, \
         f.errors, f.line_buffering, f.write_through, f.newlines, f.isatty(), f.fileno(), f.buffer, f.closed)",
        "import sys; print(sys.stdin.read(), repr(sys.stdin))",
        "import sys; sys.stdout.write('no newline'); sys.stderr.write('e'); sys.stdout.write(' at all')",
        "import sys; sys.stdout.write('x' * 300000); sys.stderr.write('y' * 100)",
        "import sys; sys.stdout.buffer.write(bytes(range(256))); print('\\udcff')",
        "import atexit; atexit.register(print, 'bye'); atexit.register(lambda: 1/0); print('end')",
        "import atexit, sys; atexit.register(print, 'bye'); sys.exit(3)",
        "import atexit; atexit._run_exitfuncs(); import json; print(json.dumps(1))",
        "class C:\n    def __del__(self): print('gone', print is None)\nkept = C(); cycle = C(); cycle.me = cycle",
        "import threading; t = threading.Thread(target=lambda: print(threading.current_thread().name)); t.start(); t.join()",
        "import threading, time\ndef work():\n    time.sleep(0.2); print('late')\nthreading.Thread(target=work).start()\nprint('early')",
        "import threading; print(threading.current_thread() is threading.main_thread(), threading.active_count(), \
         threading.main_thread().name, threading.enumerate() == [threading.main_thread()])",
        "import threading; threading.Thread(target=lambda: 1/0, name='T').start()",
        "import os, threading; print(threading.get_native_id() == os.getpid())",
        "import signal, os, threading\nsignal.signal(signal.SIGUSR1, lambda *a: print('handled', \
         threading.current_thread() is threading.main_thread()))\nos.kill(os.getpid(), signal.SIGUSR1)\nprint('after')",
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True))",
        "import os\nif os.fork() == 0:\n    print('child', flush=True); os._exit(0)\nos.wait(); print('parent')",
        "import os\nif os.fork() == 0:\n    raise SystemExit(4)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))",
        "import os; os.execvp('echo', ['echo', 'became', 'another'])",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0.01); return 5\nprint(asyncio.run(f()))",
        "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', 'sub'); return await p.wait()\nprint(asyncio.run(f()))",
        "from concurrent.futures import ThreadPoolExecutor as T\nwith T(4) as t:\n    print(sum(t.map(lambda x: x * x, range(9))))",
        "import ctypes, socket, struct, select, gc, operator, collections, itertools, posix; \
         print(ctypes.sizeof(ctypes.c_long), ctypes.pythonapi.Py_GetVersion is not None, struct.calcsize('q'), \
         socket.socketpair()[0].family, gc.isenabled(), gc.get_threshold(), collections.OrderedDict(a=1))",
        "import ctypes; print(ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 3)())",
        "import sys; print(sorted(m for m in sys.modules if 'warm' in m or 'ctypes' in m))",
        "import logging; logging.basicConfig(); logging.warning('careful'); logging.getLogger('a').error('e', exc_info=False)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(1, 2)\nimport io; r = unittest.main(exit=False, argv=['x'], testRunner=unittest.TextTestRunner(io.StringIO())).result; print(r, r.failures)",
        "import pickle\nclass C: pass\nprint(pickle.loads(pickle.dumps(C())).__class__, C, C.__module__)",
        "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__); 1/0",
        "import sys; sys.excepthook = lambda *a: 1/0; raise ValueError",
        "import sys; sys.stdout.close(); print('x')",
        "import os; os.close(1); print('x')",
        "import signal, sys; print(signal.getsignal(signal.SIGPIPE)); sys.stdout.flush()",
        "import runpy, sys; print(runpy.run_path(sys.argv[0] + 'x' if len(sys.argv) > 9 else '/dev/null'))",
        "import module; print(module.__name__, module.__file__)",
        "import time, os; os.environ['TZ'] = 'Asia/Tokyo'; time.tzset(); print(time.tzname, time.localtime(0).tm_hour)",
        "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE))",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass",
        "import json, decimal, sqlite3, zlib, hashlib, uuid; print(hashlib.sha256(b'x').hexdigest(), \
         sqlite3.connect(':memory:').execute('select 1').fetchall(), json.dumps({'a': [1, 2.5, None]}))",
        "class C:\n    def __del__(self): print('gone'); open('made', 'w').write('x')\nimport builtins, sys, json, module\n\
         builtins.c = C(); sys.c = C(); module.c = C(); print(len([C()])); raise ValueError",
        "import sys\nclass W:\n    def __init__(self, s): self.s = s\n    def write(self, t): return self.s.write(t.upper())\n    \
         def flush(self): self.s.flush()\nsys.stdout = W(sys.stdout); print('loud')",
        "import ctypes; ctypes.CDLL(None).printf(b'from C\\n'); print('from Python')",
        "exit(5)",
        "help",
        "import pdb",
        "open('made', 'w').write('unflushed'); f = open('made2', 'w'); f.write('unflushed'); import os; print(os.stat('made').st_size)",
        "import sys; sys.setrecursionlimit(50)\ndef f(n):\n    return f(n + 1)\ntry:\n    f(0)\nexcept RecursionError as e:\n    \
         n = 0; t = e.__traceback__\n    while t: t = t.tb_next; n += 1\n    print(n)",
    ]
    .into_iter()
    .flat_map(|text| [script(text), code(text)])
    .map(|run| run.file("module.py", "pass"))
    .collect();
    for method in ["fork", "spawn", "forkserver"] {
        runs.push(script(&format!(
            "import multiprocessing as m, os\ndef work(x):\n    return x * x, __name__ in ('__main__', '__mp_main__')\n\
             if __name__ == '__main__':\n    with m.get_context('{method}').Pool(2) as p:\n        print(p.map(work, range(5)))\n    \
             p = m.get_context('{method}').Process(target=os._exit, args=(6,)); p.start(); p.join(); print(p.exitcode)\n    \
             print(m.parent_process(), m.current_process().name)"
        )));
    }
    let read = "import sys\nprint(sys.argv, repr(sys.stdin.read()), sys.stdin.newlines)";
    let shown = b"import sys\nprint(sys.argv, __file__, sys.path[0], sys.stdin.read())\n1/0\n";
    runs.extend([
        script(read).input(b"one\r\ntwo\nthree\rlast"),
        code(read).input(b"\xff\xc3\xa4"),
        code("for line in __import__('sys').stdin: print(line)").input(b"a\nb"),
        code("print(input('? '), input())").input(b"first\nsecond\n"),
        code("input()").input(b""),
        Run::new(&["-"]).input(shown),
        Run::new(&["-", "a"]).input(shown),
        Run::new(&[]).input(shown),
        Run::new(&["./script.py"]).file("script.py", "print(__file__)\nraise OSError(2, 'no')"),
        Run::new(&["sub/../script.py"]).file("script.py", "print(__file__)\n1/0"),
        Run::new(&["latin.py"]).file("latin.py", "# coding: latin-1\nprint('\u{e4}')"),
        Run::new(&["bom.py"]).file("bom.py", "\u{feff}print('bom')\n\u{ff08}"),
        Run::new(&["nul.py"]).file("nul.py", "print(1)\n\0\n"),
        Run::new(&["-c", "print('a\u{e4}\u{1f40d}')", "\u{e4}"]),
        script("import sys, os; print(os.environ['A'], os.getenv('B'), len(os.environ))")
            .env("A", "\u{e4}")
            .env("B", ""),
        script("import time; print(time.tzname, time.timezone, time.localtime(0))")
            .env("TZ", "America/New_York"),
        code("import os; print(os.getcwd())").folder("/usr/lib"),
        Run::new(&["sent.py", "a"]).sent("sent.py", SENT),
        Run::new(&["sent.py"])
            .file("sent.py", "print('former')")
            .sent("sent.py", SENT),
        Run::new(&["new/folder/sent.py"]).sent("new/folder/sent.py", SENT),
        Run::new(&["sent.py"]).sent("sent.py", ""),
    ]);
    runs
}

/// Runs that a fork can't be: they are started anew, and are the same for that.
fn runs_that_do_not_fit() -> Vec<Run> {
    vec![
        Run::new(&["absent.py"]),
        Run::new(&["-m", "this"]),
        Run::new(&["-u", "-c", "print(1)"]),
        Run::new(&["-c"]),
        Run::new(&["--version"]),
        Run::new(&["folder"]).file("folder/__main__.py", "print('package')"),
        code("import sys; print(sys.flags.hash_randomization, hash('x'))")
            .env("PYTHONHASHSEED", "1"),
        code("print('\u{e4}')").env("LC_ALL", "C"),
        code("print(1)").env("PATH", "/usr/bin"),
        code("print(1)").folder("/absent"),
        Run::new(&["sub"]).sent("sub", SENT),
        Run::new(&["file/sent.py"])
            .file("file", "")
            .sent("file/sent.py", SENT),
        Run::new(&["sent.py"]).sent("", SENT),
        code("import site; print(site.USER_SITE)").env("HOME", "/tmp"),
    ]
}

fn warmed() -> Option<MutexGuard<'static, Host>> {
    let host = Host::boot();
    if host.is_none() {
        eprintln!("Skipped: there is no /usr/bin/python3 that can be kept warm");
    }
    host
}

#[test]
fn forked_runs_can_not_be_told_from_those_that_are_started_anew() {
    let Some(mut host) = warmed() else {
        return;
    };
    let (fitting, others) = (runs(), runs_that_do_not_fit());
    let mut see = |run: &Run| host.run(run);
    let anew: Vec<Seen> = fitting.iter().chain(&others).map(&mut see).collect();
    assert!(anew.iter().all(|seen| !seen.warm));

    host.warm_up("import json, multiprocessing, random, asyncio, unittest, logging");
    let mut different = Vec::new();
    for (place, (run, anew)) in fitting.iter().chain(&others).zip(&anew).enumerate() {
        let fits = place < fitting.len();
        let forked = if fits { host.fork(run) } else { host.run(run) };
        if forked.warm != fits || !forked.looks_like(anew) {
            different.push(format!("{run:?}\n  forked: {forked:?}\n  anew:   {anew:?}"));
        }
    }
    assert!(
        different.is_empty(),
        "{} of {} differ:\n{}",
        different.len(),
        anew.len(),
        different.join("\n")
    );

    // A terminal, and keys at it.
    let terminal = Stdio::Terminal(TerminalSize {
        columns: 91,
        rows: 17,
    });
    let at_terminal = code(
        "import os, sys; print(os.get_terminal_size(0), sys.stdin.isatty(), sys.stdout.line_buffering, \
         os.tcgetpgrp(0) == os.getpgrp(), os.environ['TERM'], os.ttyname(0)[:8], open('/dev/tty').isatty())",
    );
    let forked = host.fork(&at_terminal.clone().stdio(terminal));
    assert!(forked.warm, "{forked:?}");
    assert_eq!(
        forked.out,
        "os.terminal_size(columns=91, lines=17) True True True xterm-256color /dev/pts True\r\n"
    );
    host.wait_for_spare();
    let typed = b"print(6*7)\nexit()\n";
    let prompt = host.run(&Run::new(&[]).stdio(terminal).input(typed));
    assert!(
        !prompt.warm && prompt.out.contains(">>>") && prompt.out.contains("42\r\n"),
        "{prompt:?}"
    );

    // Signals from outside.
    for (signal, status) in [(2, ExitStatus::Signal(2)), (15, ExitStatus::Signal(15))] {
        host.wait_for_spare();
        let running = host.start(&code(
            "import time\nprint('up', flush=True)\ntime.sleep(20)",
        ));
        assert_eq!(running.line(), "up\n");
        host.send(&ToAgent::Signal {
            command_id: running.id,
            signal,
        });
        let seen = host.finish(&running);
        assert!(seen.warm && seen.status == status, "{seen:?}");
        assert_eq!(
            seen.err.contains("KeyboardInterrupt"),
            signal == 2,
            "{seen:?}"
        );
    }
}

#[test]
fn nothing_of_the_template_is_left_in_a_fork() {
    let Some(mut host) = warmed() else {
        return;
    };
    host.warm_up(WARMING);
    let drawn = "import os, random, secrets, ssl, tempfile, uuid, multiprocessing\n\
         print(random.random(), secrets.token_hex(), uuid.uuid4(), uuid.uuid1(), tempfile.mktemp(), ssl.RAND_bytes(9), \
         bytes(multiprocessing.current_process().authkey), uuid.getnode(), sep='\\n')";
    let mut seen: Vec<String> = Vec::new();
    for _ in 0..10 {
        let forked = host.fork(&code(drawn));
        assert!(forked.warm && forked.err.is_empty(), "{forked:?}");
        seen.extend(forked.out.lines().map(str::to_owned));
    }
    let count = seen.len();
    seen.sort();
    seen.dedup();
    assert_eq!((count, seen.len()), (80, 80));

    assert_eq!(host.fork(&code(RENEWED)).out, "[]\n");
}

#[test]
fn whoever_kills_the_warm_interpreter_has_python3_started_anew() {
    let Some(mut host) = warmed() else {
        return;
    };
    host.warm_up("pass");
    let seen = host.fork(&code("import os; print(os.getpid())"));
    assert!(seen.warm);
    // One in reserve that is killed before or while it takes its order takes no command with it; nor does the server.
    for _ in 0..20 {
        host.kill_spare();
        let seen = host.run(&code("print('still')"));
        assert_eq!(
            (seen.out.as_str(), seen.status),
            ("still\n", ExitStatus::Code(0))
        );
    }
    host.kill_server();
    for _ in 0..2 {
        let seen = host.run(&code("print('anew')"));
        assert_eq!((seen.out.as_str(), seen.warm), ("anew\n", false));
    }
    host.warm_up("pass");
    assert!(host.fork(&code("pass")).warm);
}

#[test]
fn whoever_stops_a_process_in_reserve_has_python3_started_anew() {
    let Some(mut host) = warmed() else {
        return;
    };
    host.warm_up("pass");
    host.wait_for_spare();
    host.signal_spare(Signal::STOP);

    let seen = host.run(&code("print('once')"));

    assert_eq!(
        (seen.out.as_str(), seen.status, seen.warm),
        ("once\n", ExitStatus::Code(0), false)
    );
    assert!(host.fork(&code("pass")).warm);
}

#[test]
fn a_script_that_is_a_pipe_is_waited_for_by_python3_alone() {
    let Some(mut host) = warmed() else {
        return;
    };
    host.warm_up("pass");
    host.wait_for_spare();
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("script.py");
    let (kind, mode) = (FileType::Fifo, Mode::RUSR | Mode::WUSR);
    rustix::fs::mknodat(CWD, &pipe, kind, mode, 0).unwrap();
    let begun = Instant::now();

    let running = host.start(&Run::new(&[pipe.to_str().unwrap()]));
    let started_after = begun.elapsed();
    std::fs::write(&pipe, "print('piped')").unwrap();
    let seen = host.finish(&running);

    assert_eq!(
        (seen.out.as_str(), seen.status, seen.warm),
        ("piped\n", ExitStatus::Code(0), false)
    );
    assert!(started_after < WARM_START_WAIT, "{started_after:?}");
}

#[test]
fn a_warm_up_that_fails_says_why_as_python3_does() {
    let Some(mut host) = warmed() else {
        return;
    };
    for (text, expected) in [
        (
            "import absent",
            "ModuleNotFoundError: No module named 'absent'",
        ),
        ("x = (", "SyntaxError"),
        ("import sys; sys.exit(0)", "has exited"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
            "has left threads behind",
        ),
    ] {
        let seen = host.try_warm_up(text);
        assert_eq!(seen.status, ExitStatus::Code(1), "{seen:?}");
        assert!(
            seen.err.contains(expected) && !seen.err.contains("warm.py"),
            "{seen:?}"
        );
    }
    let seen = host.try_warm_up("print('seen')");
    assert_eq!(
        (seen.out.as_str(), seen.status),
        ("seen\n", ExitStatus::Code(0))
    );
    match host.refused_warm_up() {
        FromAgent::SpawnFailed { kind, message, .. } => {
            assert_eq!(kind, SpawnFailure::Invalid);
            assert!(message.contains("already"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_run_leaves_behind_is_not_in_the_next() {
    let Some(mut host) = warmed() else {
        return;
    };
    host.warm_up("import json");
    host.fork(&code("import builtins, json, os; builtins.left = json.left = 1; os.environ['LEFT'] = '1'; os.chdir('/')"));
    let seen = host.fork(&code("import builtins, json, os; print(hasattr(builtins, 'left'), hasattr(json, 'left'), 'LEFT' in os.environ)"));
    assert_eq!(
        (seen.out.as_str(), seen.warm),
        ("False False False\n", true)
    );
}
