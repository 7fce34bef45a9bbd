//! Programs that people run.

use std::time::Duration;

use sandvmm_tests::run;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_script_that_uses_much_of_the_standard_library_works() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/machine/standard_library.py");
    let ran = run([
        "--memory",
        "512M",
        "--cpus",
        "2",
        "--timeout",
        "120s",
        script,
    ])
    .done()
    .expect(0);
    assert_eq!(
        ran.text(),
        "sqlite3 4950\njson ok\nsubprocess HELLO\nthreads 4000\nmultiprocessing [0, 1, 4, 9]\nsockets b'PING'\ntempfile True\nasyncio [0, 1, 2]\ndone\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_standard_librarys_own_tests_pass_as_on_the_host() {
    // Modules that lean on the operating system and take seconds on a processor that is not emulated. `test_subprocess` passes as well, and
    // takes minutes on one that is.
    const MODULES: [&str; 13] = [
        "test_base64",
        "test_configparser",
        "test_csv",
        "test_epoll",
        "test_fcntl",
        "test_glob",
        "test_json",
        "test_mmap",
        "test_popen",
        "test_pty",
        "test_shlex",
        "test_struct",
        "test_uuid",
    ];
    let image =
        std::env::var_os("SANDVMM_TEST_ROOTFS").expect("xtask names the image with the test suite");

    let ran = run([
        "--memory",
        "1G",
        "--cpus",
        "2",
        "--timeout",
        "900s",
        "--rootfs",
    ])
    .arg(&image)
    .args(["--", "python3", "-m", "test"])
    .args(MODULES)
    .within(Duration::from_secs(960))
    .done()
    .expect(0);

    assert!(ran.text().contains("All 13 tests OK."), "{}", ran.text());
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_examples_do_what_their_first_lines_say() {
    let example = |name: &str| format!("{}/../examples/{name}", env!("CARGO_MANIFEST_DIR"));

    let run = |options: &[&str]| run(["--timeout", "120s"]).args(options);

    let hello = run(&[]).arg(example("hello.py")).done().expect(0);
    let pi = run(&[]).arg(example("pi.sh")).arg("50").done().expect(0);
    let words = run(&["-i"])
        .arg(example("wordcount.py"))
        .arg("2")
        .stdin("To be, or not to be: that is the question\nwhether to be\n")
        .done()
        .expect(0);

    assert_eq!(hello.text(), "hello from inside a microVM\n");
    assert_eq!(
        pi.text(),
        "3.14159265358979323846264338327950288419716939937510\n"
    );
    assert_eq!(words.text(), "       3 to\n       3 be\n");
}
