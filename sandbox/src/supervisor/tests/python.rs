//! Contexts of Python: the real program of the guest, in this host's `python3`, and others that lie.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command as Process;
use std::sync::mpsc::channel;

use rustix::process::{Pid, Signal, kill_process_group};

use super::*;
use crate::{OutputStream, Python, PythonError};

/// A guest that starts `program` (its arguments where it is Python) for every command, until its control stream ends.
fn guest(peer: &Peer, mut agent: UnixStream, program: Option<&[&str]>) {
    let mut running: Vec<(u32, Pid)> = Vec::new();
    let read = |agent: &mut UnixStream| frame::read::<ToAgent>(agent, MAX_TO_AGENT_BYTES);
    while let Ok(message) = read(&mut agent) {
        match message {
            ToAgent::Spawn(spawn) => {
                let [stdin, stdout, stderr] = [0; 3].map(|_| OwnedFd::from(peer.accept().0));
                let words: Vec<String> = spawn
                    .args
                    .iter()
                    .map(|word| String::from_utf8(word.clone()).unwrap())
                    .collect();
                let mut process = match program {
                    None => {
                        let mut python = Process::new("python3");
                        python.args(words);
                        python
                    }
                    Some(program) => {
                        let mut other = Process::new(program[0]);
                        other.args(&program[1..]);
                        other
                    }
                };
                let mut child = process
                    .process_group(0)
                    .stdin(stdin)
                    .stdout(stdout)
                    .stderr(stderr)
                    .spawn()
                    .unwrap();
                drop(process);
                running.push((spawn.command_id, Pid::from_child(&child)));
                let command_id = spawn.command_id;
                let warm = false;
                say(&mut agent, &FromAgent::Spawned { command_id, warm });
                let mut agent = agent.try_clone().unwrap();
                std::thread::spawn(move || {
                    use std::os::unix::process::ExitStatusExt;
                    let status = child.wait().unwrap();
                    let status = match status.code() {
                        Some(code) => ExitStatus::Code(code),
                        None => ExitStatus::Signal(status.signal().unwrap()),
                    };
                    let exited = FromAgent::Exited(Exited {
                        command_id,
                        status,
                        oom_kills: 0,
                        peak_processes: 0,
                        peak_memory_bytes: 0,
                        cpu_time_us: 0,
                        process_limit_hits: 0,
                        disk_used_bytes: 0,
                        disk_free_bytes: 1 << 20,
                        is_kept: true,
                    });
                    // The test may be over.
                    let _ = frame::write(&mut agent, &exited, MAX_FROM_AGENT_BYTES);
                });
            }
            ToAgent::Signal { command_id, signal } => {
                let signal = Signal::from_named_raw(signal).unwrap();
                for (_, pid) in running.iter().filter(|(id, _)| *id == command_id) {
                    let _ = kill_process_group(*pid, signal);
                }
            }
            ToAgent::Kill { command_id } => {
                for (_, pid) in running.iter().filter(|(id, _)| *id == command_id) {
                    let _ = kill_process_group(*pid, Signal::KILL);
                }
            }
            _ => {}
        }
    }
    for (_, pid) in running {
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

fn with_guest<T>(program: Option<&[&str]>, test: impl FnOnce(&Sandbox) -> T) -> T {
    let (sandbox, peer, agent) = ready_sandbox(None);
    agent.set_read_timeout(None).unwrap();
    let closing = agent.try_clone().unwrap();
    std::thread::scope(|scope| {
        let peer = &peer;
        scope.spawn(move || guest(peer, agent, program));
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| test(&sandbox)));
        let _ = closing.shutdown(std::net::Shutdown::Both);
        match result {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn with_python(test: impl FnOnce(&Python)) {
    with_guest(None, |sandbox| test(&sandbox.python().unwrap()));
}

#[test]
fn state_stays_and_the_last_expression_is_the_value() {
    with_python(|python| {
        let first = python.run("import json\nx = 41").unwrap();
        let second = python.run("print('out'); x + 1").unwrap();
        let third = python.run("_ * 2").unwrap();

        assert_eq!((first.value, first.exception), (None, None));
        assert_eq!(second.text(), Some("42"));
        assert_eq!(
            (second.stdout_text().as_str(), second.stderr.len()),
            ("out\n", 0)
        );
        assert_eq!(third.text(), Some("84"));
    });
}

#[test]
fn an_exception_has_name_value_and_a_traceback_of_the_code_alone() {
    with_python(|python| {
        python.run("def f():\n    raise ValueError('ä')").unwrap();
        let failed = python.run("x = 1\nf()").unwrap().exception.unwrap();
        let syntax = python.run("for").unwrap().exception.unwrap();
        let left = python.run("exit(3)").unwrap().exception.unwrap();

        assert_eq!(
            (failed.name.as_str(), failed.value.as_str()),
            ("ValueError", "ä")
        );
        assert!(
            failed.traceback.contains("raise ValueError('ä')"),
            "{failed:?}"
        );
        assert!(!failed.traceback.contains("sandvmm"), "{failed:?}");
        assert_eq!(syntax.name, "SyntaxError");
        assert_eq!(
            (left.name.as_str(), left.value.as_str()),
            ("SystemExit", "3")
        );
        assert_eq!(python.run("x").unwrap().text(), Some("1"));
    });
}

#[test]
fn values_are_shown_as_they_ask_for_and_displays_in_order() {
    with_python(|python| {
        let code = "class Table:
    def _repr_html_(self): return '<b>ä</b>'
    def _repr_png_(self): return b'\\x89PNG'
    def __repr__(self): return 'a table'
print('before'); display(1, Table()); Table()";
        let shown = python.run(code).unwrap();
        let broken = python
            .run("class Broken:\n    def __repr__(self): 1/0\nBroken()")
            .unwrap();

        let value = shown.value.unwrap();
        assert_eq!(value.text(), Some("a table"));
        assert_eq!(value.html(), Some("<b>ä</b>"));
        assert_eq!(value.png(), Some(&b"\x89PNG"[..]));
        assert_eq!(shown.displays.len(), 2);
        assert_eq!(shown.displays[0].text(), Some("1"));
        assert_eq!(shown.displays[1], value);
        assert_eq!(broken.exception.unwrap().name, "ZeroDivisionError");
    });
}

#[test]
fn a_representation_that_is_too_large_is_left_out_and_the_context_goes_on() {
    with_python(|python| {
        let code = r"state = 7
class Large:
    def __init__(self, size): self.size = size
    def _repr_html_(self): return 'x' * self.size
    def _repr_png_(self): return b'x' * (self.size + 1)
    def _repr_markdown_(self): return '\u20ac' * (self.size // 2)
    def __repr__(self): return 'x' * (1 << 21)
Large(8 << 20)";
        let at_the_bound = python.run(code).unwrap().value.unwrap();
        let above = python.run("Large((8 << 20) + 1)").unwrap().value.unwrap();

        assert_eq!(at_the_bound.html().unwrap().len(), 8 << 20);
        // Bytes count, not characters, of which there are fewer.
        assert_eq!(at_the_bound.png(), None);
        assert_eq!(at_the_bound.get("text/markdown"), None);
        assert_eq!(above.html(), None);
        // A text is cut, and shows it.
        let text = above.text().unwrap();
        assert_eq!(text.chars().count(), (1 << 20) + 1);
        assert!(text.ends_with("x…"));
        assert_eq!(python.run("state").unwrap().text(), Some("7"));
    });
}

#[test]
fn all_representations_of_a_value_have_one_bound() {
    with_python(|python| {
        let code = r"class Many:
    def _repr_mimebundle_(self):
        return {f'a/{number}': '\1' * (8 << 20) for number in range(10)}
    def __repr__(self): return 'many'
Many()";
        let many = python.run(code).unwrap().value.unwrap();
        // As many as there is room for: each takes six bytes for one of these on its way.
        assert_eq!(many.text(), Some("many"));
        assert_eq!(many.iter().count(), 2);

        // A figure, of a module that is as matplotlib is to the driver.
        let figure = "import sys, types
pyplot = types.SimpleNamespace(
    figures=[1], get_fignums=lambda: list(pyplot.figures), close=lambda number: pyplot.figures.clear(),
    figure=lambda number: types.SimpleNamespace(savefig=lambda image, **_: image.write(b'x' * (9 << 20))))
sys.modules['matplotlib.pyplot'] = pyplot";
        let drawn = python.run(figure).unwrap();
        assert_eq!((drawn.displays.len(), drawn.exception), (1, None));
        assert_eq!(drawn.displays[0].png(), None);
        assert!(drawn.displays[0].text().unwrap().starts_with("namespace("));
    });
}

#[test]
fn halves_of_characters_and_endless_names_are_no_end_of_a_context() {
    with_python(|python| {
        let code = r"class Odd:
    def _repr_mimebundle_(self): return {'a/\ud800': 'b\udfff', 'text/plain': '\udc80' * (1 << 21)}
Odd()";
        let odd = python.run(code).unwrap().value.unwrap();
        assert_eq!(odd.get(r"a/\ud800"), Some(&br"b\udfff"[..]));
        assert!(odd.text().unwrap().starts_with(r"\udc80\udc80"));

        let raised = python.run(r"raise ValueError('\udcff')").unwrap();
        assert_eq!(raised.exception.unwrap().value, r"\udcff");
        let raised = python
            .run("raise type('N' * (70 << 20), (Exception,), {})('v' * (70 << 20))")
            .unwrap();
        let exception = raised.exception.unwrap();
        for text in [&exception.name, &exception.value, &exception.traceback] {
            assert_eq!(text.chars().count(), (1 << 20) + 1);
        }
    });
}

#[test]
fn thousands_of_displays_are_kept_up_to_their_bounds() {
    with_python(|python| {
        let many = python
            .run("for number in range(5000): display(number)\n'end'")
            .unwrap();
        assert_eq!((many.displays.len(), many.truncated), (1000, true));
        assert_eq!(many.displays[999].text(), Some("999"));
        assert_eq!(many.text(), Some("'end'"));

        let large = "class Large:
    def _repr_png_(self): return bytes(8 << 20)
    def __repr__(self): return ''
for _ in range(20): display(Large())";
        let large = python.run(large).unwrap();
        assert_eq!((large.displays.len(), large.truncated), (16, true));
        let bytes = large.displays.iter().flat_map(crate::Representations::iter);
        let bytes: usize = bytes.map(|(_, bytes)| bytes.len()).sum();
        assert_eq!(bytes, 128 << 20);
        let next = python.run("1 + 1").unwrap();
        assert_eq!((next.text(), next.truncated), (Some("2"), false));
    });
}

#[test]
fn output_comes_as_it_happens_and_processes_write_to_it_too() {
    with_python(|python| {
        let (sender, seen) = channel();
        let code = "import subprocess, sys
print('one'); print('two', file=sys.stderr)
subprocess.run(['echo', 'three'])
sys.stdin.read(), input.__name__
import time; time.sleep(0.5)
sys.stdout.write('no end')";
        let began = Instant::now();
        let evaluation = python
            .call(code)
            .on_output(move |stream, bytes| {
                sender
                    .send((stream, bytes.to_vec(), began.elapsed()))
                    .unwrap();
            })
            .run()
            .unwrap();

        assert_eq!(evaluation.stdout_text(), "one\nthree\nno end");
        assert_eq!(evaluation.stderr, b"two\n");
        let seen: Vec<_> = seen.iter().collect();
        let early = |stream| -> Vec<u8> {
            let soon = |at: Duration| at + Duration::from_millis(300) < evaluation.wall;
            let seen = seen
                .iter()
                .filter(|(from, _, at)| *from == stream && soon(*at));
            seen.flat_map(|(_, bytes, _)| bytes.clone()).collect()
        };
        assert_eq!(early(OutputStream::Stdout), b"one\nthree\n");
        assert_eq!(early(OutputStream::Stderr), b"two\n");
    });
}

#[test]
fn an_interrupt_ends_the_code_and_leaves_the_state() {
    with_python(|python| {
        // While nothing runs there is nothing to interrupt.
        python.interrupt().unwrap();
        python.run("x = 7").unwrap();
        let late = python
            .call("y = 8\nwhile True: pass")
            .deadline(Duration::from_millis(300))
            .run()
            .unwrap();
        let flood = python
            .call("while True: display(1)")
            .deadline(Duration::from_millis(300))
            .run()
            .unwrap();

        assert!(late.timed_out && flood.timed_out);
        let exception = late.exception.unwrap();
        assert_eq!(exception.name, "KeyboardInterrupt");
        assert!(
            exception
                .traceback
                .ends_with("while True: pass\nKeyboardInterrupt\n"),
            "{exception:?}"
        );
        assert!(!flood.displays.is_empty());
        assert_eq!(python.run("x, y").unwrap().text(), Some("(7, 8)"));
    });
}

#[test]
fn code_that_will_not_be_interrupted_loses_its_interpreter_alone() {
    with_guest(None, |sandbox| {
        let (stuck, other) = (sandbox.python().unwrap(), sandbox.python().unwrap());
        other.run("x = 1").unwrap();

        let error = stuck
            .call("import time\nwhile True:\n    try: time.sleep(1)\n    except KeyboardInterrupt: pass")
            .deadline(Duration::from_millis(100))
            .run()
            .unwrap_err();
        let after = stuck.run("1").unwrap_err();
        stuck.restart().unwrap();

        assert!(matches!(error, PythonError::Stuck), "{error:?}");
        assert!(
            matches!(after, PythonError::Ended(Outcome::Signaled(9))),
            "{after:?}"
        );
        assert_eq!(stuck.run("1 + 1").unwrap().text(), Some("2"));
        assert_eq!(other.run("x").unwrap().text(), Some("1"));
    });
}

#[test]
fn an_interpreter_that_ends_is_told_with_its_status_and_begins_anew() {
    with_python(|python| {
        python.run("x = 1").unwrap();
        let ended = python.run("import os; os._exit(3)").unwrap_err();
        python.restart().unwrap();

        assert!(
            matches!(ended, PythonError::Ended(Outcome::Exited(3))),
            "{ended:?}"
        );
        assert_eq!(
            python.run("x").unwrap().exception.unwrap().name,
            "NameError"
        );
    });
}

#[test]
fn a_restart_comes_from_under_a_run() {
    with_python(|python| {
        let ended = std::thread::scope(|scope| {
            let running = scope.spawn(|| python.run("import time; time.sleep(1000)"));
            std::thread::sleep(Duration::from_millis(300));
            python.restart().unwrap();
            running.join().unwrap().unwrap_err()
        });

        assert!(
            matches!(ended, PythonError::Ended(Outcome::Signaled(9))),
            "{ended:?}"
        );
        assert_eq!(python.run("2").unwrap().text(), Some("2"));
    });
}

#[test]
fn a_prompt_knows_whether_code_is_complete() {
    with_python(|python| {
        for (code, is_complete) in [
            ("x = 1", true),
            ("f(", false),
            ("if x:", false),
            ("if x:\n    pass", false),
            ("if x:\n    pass\n", true),
            ("x = )", true),
        ] {
            assert_eq!(python.is_complete(code).unwrap(), is_complete, "{code:?}");
        }
    });
}

#[test]
fn a_forked_process_that_comes_back_is_not_taken_for_the_context() {
    with_python(|python| {
        let forked = python
            .run("import os\nif os.fork(): os.wait()\nprint('here')")
            .unwrap();

        assert_eq!(forked.stdout_text(), "here\nhere\n");
        assert_eq!(python.run("3").unwrap().text(), Some("3"));
    });
}

#[test]
fn what_is_no_context_is_told_so() {
    let start =
        |program: &[&str]| with_guest(Some(program), |sandbox| sandbox.python().unwrap_err());

    let garbage = start(&["printf", "garbage, and more of it"]);
    let huge = start(&["printf", r"\377\377\377\377O"]);
    let other = start(&["sh", "-c", r"printf '\001\000\000\000C1'; sleep 100"]);
    let failed = start(&[
        "sh",
        "-c",
        "echo first >&2; echo 'No module named x' >&2; exit 1",
    ]);

    assert!(matches!(huge, PythonError::Unfit(_)), "{huge:?}");
    assert!(matches!(garbage, PythonError::Unfit(_)), "{garbage:?}");
    assert!(matches!(other, PythonError::Misbehaved), "{other:?}");
    match failed {
        PythonError::Unfit(words) => assert_eq!(words, "No module named x"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_context_that_was_taken_over_is_ended() {
    // A context at first, then something that no context says.
    for lie in [
        r"\377\377\377\377O",
        r"\001\000\000\000?x",
        r"\002\000\000\000V[]",
    ] {
        let script = format!(
            r"printf '\002\000\000\000.{{}}'; head -c 4 > /dev/null; printf '{lie}'; sleep 100"
        );
        let error = with_guest(Some(&["sh", "-c", &script]), |sandbox| {
            sandbox.python().unwrap().run("1").unwrap_err()
        });
        assert!(matches!(error, PythonError::Misbehaved), "{error:?}");
    }
}

#[test]
fn the_machines_end_is_told_as_what_it_is() {
    let error = with_guest(None, |sandbox| {
        let python = sandbox.python().unwrap();
        std::thread::scope(|scope| {
            let running = scope.spawn(|| python.run("import time; time.sleep(1000)"));
            std::thread::sleep(Duration::from_millis(200));
            sandbox.end();
            running.join().unwrap().unwrap_err()
        })
    });
    assert!(matches!(error, PythonError::SandboxEnded), "{error:?}");
}
