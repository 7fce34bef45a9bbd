//! Programs that people run.

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
fn the_standard_librarys_own_tests_give_the_result_that_they_give_on_the_host() {
    const MODULES: [&str; 14] = [
        "test_json",
        "test_subprocess",
        "test_sqlite3",
        "test_tempfile",
        "test_threading",
        "test_queue",
        "test_os",
        "test_io",
        "test_pty",
        "test_hashlib",
        "test_zlib",
        "test_struct",
        "test_random",
        "test_time",
    ];
    let image =
        std::env::var_os("SANDVMM_TEST_ROOTFS").expect("xtask names the image with the test suite");
    let mut wrong = Vec::new();
    for module in MODULES {
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
        .args(["--", "python3", "-m", "test", module])
        .done();
        if ran.code != 0 {
            wrong.push(format!(
                "{module}: {}\n{}\n{}",
                ran.code,
                ran.text(),
                ran.stderr
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
