//! Templates: built once, forked for each run, and no two forks alike.

mod given;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandvmm::{Images, Outcome, Sandbox, Template};
use sandvmm_tests::{Call, HUNG_AFTER, now_s, run, sandvmm};
use tempfile::TempDir;

/// What the host's clock may be ahead of a guest's that has just read its own, on an emulated processor.
const CLOCK_TOLERANCE_S: f64 = 5.0;

/// A data folder of its own, with the images of the real one and no template.
struct Home(TempDir);

impl Home {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let images = Images::from_data_folder().unwrap();
        for path in [images.kernel, images.initrd, images.rootfs] {
            let name = path.file_name().unwrap();
            symlink(path.canonicalize().unwrap(), home.path().join(name)).unwrap();
        }
        Self(home)
    }

    fn sandvmm(&self, args: &[&str]) -> Call {
        sandvmm(args.iter().copied())
            .env("SANDVMM_HOME", self.0.path())
            .within(HUNG_AFTER * 2)
    }

    fn run(&self, args: &[&str]) -> Call {
        run(args.iter().copied()).env("SANDVMM_HOME", self.0.path())
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.0.path().join("templates").join(name)
    }

    fn inputs_digest(&self, name: &str) -> String {
        let inspected = self.sandvmm(&["template", "inspect", name]).done();
        let digest = &inspected.expect(0).json()["inputs_digest"];
        digest.as_str().unwrap().to_owned()
    }

    /// A template with a warm interpreter.
    fn build(&self, name: &str, args: &[&str]) {
        let fixed = ["template", "build", name, "--memory", "128M"];
        self.sandvmm(&[&fixed, args].concat()).done().expect(0);
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn forks_of_a_template_run_and_no_two_are_alike() {
    let home = Home::new();
    let note = home.0.path().join("note");
    fs::write(&note, "copied").unwrap();
    let copy = format!("{}:/var/tmp/copied", note.display());
    let args = [
        ["--warm", "import json, random, time, uuid"],
        ["--copy", &copy],
        ["--run", "echo kept > /var/tmp/kept"],
    ];
    home.build("t", args.as_flattened());
    // The same once more is another template of the same inputs.
    home.build("again", args.as_flattened());
    let digest = home.inputs_digest("t");
    assert_eq!(home.inputs_digest("again"), digest);
    let listed = home.sandvmm(&["template", "list"]).done().expect(0);
    let line = |name: &str| format!("{name}\t128 MiB\t1 CPU\t{digest}\n");
    assert_eq!(listed.text(), line("again") + &line("t"));
    let listed = home.sandvmm(&["template", "list", "--json"]);
    let listed = listed.done().expect(0);
    let names = listed.text().lines().map(|line| {
        let shown: serde_json::Value = serde_json::from_str(line).unwrap();
        (shown["name"].clone(), shown["inputs_digest"].clone())
    });
    let expected = ["again", "t"].map(|name| (name.into(), digest.clone().into()));
    assert_eq!(names.collect::<Vec<_>>(), expected);
    let before = home.sandvmm(&["template", "verify", "t"]).done().expect(0);
    assert_eq!(before.text(), "t is whole\n");
    let code = "import json, os, random, socket, time, uuid
begun = time.monotonic(); time.sleep(0.1); slept = time.monotonic() - begun
read = lambda path: open(path).read().strip()
print(json.dumps({
    'slept': slept, 'clock': time.time(), 'kept': read('/var/tmp/kept'),
    'own': [read('/proc/sys/kernel/random/uuid'), os.urandom(16).hex(), str(uuid.uuid4()), random.random(),
            read('/proc/sys/kernel/random/boot_id'), read('/etc/machine-id'), socket.gethostname()]}))";

    let mut own = HashSet::new();
    for _ in 0..5 {
        let ran = home
            .run(&["--template", "t", "--json", "--timeout", "200s", "-c", code])
            .done()
            .expect(0);
        let now = now_s();
        let report = ran.json();
        assert_eq!(report["template"], "t");
        assert_eq!(report["warm"], true, "{report}");
        let told: serde_json::Value =
            serde_json::from_str(report["stdout"].as_str().unwrap()).unwrap();
        assert_eq!(told["kept"], "kept");
        let clock = told["clock"].as_f64().unwrap();
        assert!(
            now - clock < CLOCK_TOLERANCE_S && clock <= now,
            "{clock} at {now}"
        );
        let slept = told["slept"].as_f64().unwrap();
        assert!((0.1..5.0).contains(&slept), "{slept}");
        for value in told["own"].as_array().unwrap() {
            assert!(own.insert(value.to_string()), "twice: {value}");
        }
    }
    // A run that writes everywhere it can changes nothing in the template.
    home.run(&[
        "--template", "t", "--timeout", "200s", "-u", "root", "-c",
        "with open('/dev/shm/x', 'wb') as file:\n    for _ in range(20): file.write(bytes(range(256)) * 4096)",
    ])
    .done()
    .expect(0);
    home.sandvmm(&["template", "verify", "t"]).done().expect(0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_default_template_is_forked_where_it_fits() {
    let home = Home::new();
    let path = |args: &[&str]| {
        let report = home
            .run(&[args, &["--json", "--timeout", "200s", "--", "true"]].concat())
            .done()
            .expect(0)
            .json();
        (report["template"].clone(), report["path_reason"].clone())
    };
    let (template, why) = path(&[]);
    assert!(template.is_null() && why == "There is no default template");

    home.build("default", &[]);

    assert_eq!(path(&["--memory", "128M"]).0, "default");
    let (template, why) = path(&[]);
    assert!(template.is_null() && why.as_str().unwrap().contains("size of memory"));
    assert!(path(&["--cold", "--memory", "128M"]).0.is_null());
    assert!(path(&["--cpus", "2", "--memory", "128M"]).0.is_null());
    home.sandvmm(&["template", "rm", "default"])
        .done()
        .expect(0);
    assert!(path(&["--memory", "128M"]).0.is_null());
    assert!(!home.folder("default").exists());
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_template_of_which_something_has_changed_is_refused_by_name() {
    let home = Home::new();
    let kernel = home.0.path().join("own-kernel");
    fs::copy(Images::from_data_folder().unwrap().kernel, &kernel).unwrap();
    home.build("t", &["--kernel", kernel.to_str().unwrap()]);
    let refused = || {
        home.run(&["--template", "t", "--", "true"])
            .done()
            .expect(125)
            .stderr
    };

    fs::write(&kernel, "another").unwrap();
    assert!(refused().contains("kernel"), "{}", refused());
    fs::copy(Images::from_data_folder().unwrap().kernel, &kernel).unwrap();
    home.run(&["--template", "t", "--timeout", "200s", "--", "true"])
        .done()
        .expect(0);

    let memory = home.folder("t").join("memory");
    assert!(fs::metadata(&memory).unwrap().permissions().readonly());
    let whole = fs::read(&memory).unwrap();
    fs::remove_file(&memory).unwrap();
    let mut changed = whole;
    changed[0x10_0000] ^= 1;
    fs::write(&memory, changed).unwrap();
    assert!(refused().contains("memory"), "{}", refused());
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_build_that_fails_leaves_nothing() {
    let home = Home::new();
    let ran = home
        .sandvmm(&[
            "template",
            "build",
            "t",
            "--memory",
            "128M",
            "--run",
            "echo no >&2; exit 3",
        ])
        .done()
        .expect(125);
    assert!(
        ran.stderr.contains("exit 3") && ran.stderr.contains("no"),
        "{}",
        ran.stderr
    );
    assert_eq!(
        fs::read_dir(home.0.path().join("templates"))
            .unwrap()
            .count(),
        0
    );

    for (args, code) in [
        (&["template", "inspect", "t"], 125),
        (&["template", "verify", "../t"], 2),
    ] {
        home.sandvmm(args).done().expect(code);
    }
    let ran = home.sandvmm(&["template", "list"]).done().expect(0);
    assert_eq!(ran.text(), "");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_template_is_replaced_when_the_new_one_is_built_and_not_before() {
    let home = Home::new();
    home.build("t", &["--run", "echo old > /var/tmp/which"]);
    let which = || {
        let call = home.run(&[
            "--template",
            "t",
            "--timeout",
            "200s",
            "--",
            "cat",
            "/var/tmp/which",
        ]);
        call.done().expect(0).text().to_owned()
    };
    let failing = [
        "template", "build", "t", "--memory", "128M", "--force", "--run", "exit 3",
    ];

    home.sandvmm(&failing).done().expect(125);
    assert_eq!(which(), "old\n");

    home.build("t", &["--force", "--run", "echo new > /var/tmp/which"]);
    assert_eq!(which(), "new\n");
    let folders = fs::read_dir(home.0.path().join("templates")).unwrap();
    assert_eq!(folders.count(), 1);
}

/// A template of the real data folder that goes with the test.
struct Named(String);

impl Drop for Named {
    fn drop(&mut self) {
        // Gone already where the test failed before it was built.
        let _ = Template::remove(&self.0);
    }
}

fn say(sandbox: &Sandbox, script: &str) -> String {
    let output = sandbox.command("sh").args(["-c", script]).output().unwrap();
    assert_eq!(output.completion.outcome, Outcome::Exited(0), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Forks of forks.
const GENERATIONS: u32 = 5;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_sandbox_in_use_is_saved_goes_on_and_is_forked_through_generations() {
    let mut sandbox = Sandbox::builder().memory_mib(128).start().unwrap();
    say(&sandbox, "echo 0 > /tmp/file");
    let counting = sandbox
        .command("sh")
        .args([
            "-c",
            // Whoever reads finds a whole number.
            "n=0; while true; do n=$((n+1)); echo $n > /tmp/next; mv /tmp/next /tmp/count; sleep 0.1; done",
        ])
        .spawn()
        .unwrap();
    for generation in 1..=GENERATIONS {
        let named = Named(format!("test-{}-{generation}", std::process::id()));
        let template = sandbox.snapshot(&named.0).unwrap();
        // The parent goes on, its command too.
        let count: u64 = say(&sandbox, "cat /tmp/count").trim().parse().unwrap();
        std::thread::sleep(Duration::from_secs(2));
        assert!(
            say(&sandbox, "cat /tmp/count")
                .trim()
                .parse::<u64>()
                .unwrap()
                > count
        );
        if generation == 1 {
            counting.kill().unwrap();
        }
        let fork = template.fork().unwrap();
        assert_eq!(say(&fork, "cat /tmp/file"), say(&sandbox, "cat /tmp/file"));
        let before: u64 = say(&fork, "cat /tmp/count").trim().parse().unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let after: u64 = say(&fork, "cat /tmp/count").trim().parse().unwrap();
        assert!(
            after > before,
            "what ran when it was saved runs in the fork"
        );
        say(&fork, &format!("echo {generation} >> /tmp/file"));
        assert!(!say(&sandbox, "cat /tmp/file").contains(&generation.to_string()));
        sandbox = fork;
    }
    assert_eq!(say(&sandbox, "cat /tmp/file"), "0\n1\n2\n3\n4\n5\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn forks_with_several_processors_run_beside_each_other() {
    let home = Home::new();
    home.build("t", &["--cpus", "3", "--warm", "import json"]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let ran = home
                    .run(&[
                        "--template",
                        "t",
                        "--timeout",
                        "200s",
                        "-c",
                        // Whoever is kept to one processor runs there from the next statement on.
                        "import os\nfor n in range(os.cpu_count()): os.sched_setaffinity(0, {n}); print(n)",
                    ])
                    .done()
                    .expect(0);
                assert_eq!(ran.text(), "0\n1\n2\n");
            });
        }
    });
    assert!(Path::new(&home.folder("t")).exists());
}
