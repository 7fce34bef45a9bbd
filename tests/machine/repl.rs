//! `sandvmm repl`.

use std::fs;

use sandvmm_tests::{Background, sandvmm};

const INPUT: &str = "x = 41
x + 1
for i in range(2):
    print(i)

def f(a,
      b):
    return a + b

f(1,
  2)
1/0
class Image:
    def _repr_png_(self): return b'\\x89PNG'
    def __repr__(self): return 'an \\x1b[2Jimage'

Image()
x";

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn lines_are_put_together_and_values_are_shown() {
    let folder = tempfile::tempdir().unwrap();

    let ran = sandvmm(["repl", "--figures"])
        .arg(folder.path())
        .stdin(INPUT)
        .done()
        .expect(0);

    let figure = folder.path().join("figure-1.png");
    assert_eq!(
        ran.text(),
        format!(
            "42\n0\n1\n3\nan \\u{{1b}}[2Jimage [{}]\n41\n",
            figure.display()
        )
    );
    assert!(
        ran.stderr.contains("ZeroDivisionError: division by zero\n"),
        "{ran:?}"
    );
    assert_eq!(fs::read(figure).unwrap(), b"\x89PNG");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn its_ends_have_their_exit_codes() {
    let exception = sandvmm(["repl"]).stdin("1\n1/0\n").done().expect(1);
    assert_eq!(exception.text(), "1\n");
    let exit = sandvmm(["repl"])
        .stdin("exit(3)\nprint(1)\n")
        .done()
        .expect(3);
    assert!(exit.stdout.is_empty(), "{exit:?}");
    let ended = sandvmm(["repl"])
        .stdin("import os; os._exit(3)\n1\n")
        .done()
        .expect(125);
    assert!(ended.stderr.contains("its state is lost"), "{ended:?}");
    let late = sandvmm(["repl", "--timeout", "40s"])
        .stdin("while True: pass\n\n")
        .done()
        .expect(124);
    assert!(late.stderr.contains("time was over"), "{late:?}");
    let one = sandvmm(["repl", "--deadline", "2s"])
        .stdin("x = 5\nwhile True: pass\n\nx\n")
        .done()
        .expect(0);
    assert_eq!(one.text(), "5\n");
    assert!(one.stderr.contains("KeyboardInterrupt"), "{one:?}");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn an_interrupt_ends_the_code_and_not_the_prompt() {
    use std::io::{Read, Write};
    let mut repl = Background::start(std::process::Command::new("sandvmm").arg("repl"));
    let mut input = repl.child().stdin.take().unwrap();
    input
        .write_all(b"x = 9\nprint('begun', flush=True); __import__('time').sleep(1000)\nx\n")
        .unwrap();
    repl.wait_for_output("begun\n");

    let pid = rustix::process::Pid::from_child(repl.child());
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    repl.wait_for_output("9\n");
    drop(input);

    assert_eq!(repl.wait(), Some(0));
    let mut stderr = String::new();
    repl.child()
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut stderr)
        .unwrap();
    assert!(stderr.contains("KeyboardInterrupt"), "{stderr}");
}
