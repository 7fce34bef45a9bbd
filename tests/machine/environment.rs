//! What a program finds around it in the guest.

use std::time::{SystemTime, UNIX_EPOCH};

use sandvmm_tests::run;

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_usual_file_systems_are_there() {
    let program = "import os
kinds = {line.split()[1]: line.split()[2] for line in open('/proc/mounts')}
for place in ['/', '/proc', '/sys', '/dev', '/dev/pts', '/dev/shm', '/run', '/sys/fs/cgroup']:
    print(place, kinds.get(place))
print(oct(os.stat('/tmp').st_mode), oct(os.stat('/dev/shm').st_mode))
print(sorted(os.listdir('/proc/self/fd'))[:3])
for name in ['null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx', 'fd', 'stdin', 'stdout', 'stderr']:
    assert os.path.lexists('/dev/' + name), name
";

    let ran = run(["-c", program]).done().expect(0);

    assert_eq!(
        ran.text(),
        "/ overlay\n/proc proc\n/sys sysfs\n/dev devtmpfs\n/dev/pts devpts\n/dev/shm tmpfs\n/run tmpfs\n/sys/fs/cgroup cgroup2\n\
         0o41777 0o41777\n['0', '1', '2']\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_default_user_is_unprivileged_with_a_home_and_default_variables() {
    let program = "import os
home = os.environ['HOME']
open(home + '/made', 'w').write('x')
print(os.getuid() != 0, os.getgid() != 0, os.getcwd() == home, os.getgroups() in ([], [os.getgid()]))
print(os.environ['USER'] == os.environ['LOGNAME'], os.environ['LANG'], 'PATH' in os.environ, os.umask(0))
print(sorted(k for k in os.environ if k not in ('HOME', 'USER', 'LOGNAME', 'LANG', 'PATH', 'SHELL')))
import sys; print(sys.stdout.encoding, sys.getfilesystemencoding())";

    let ran = run(["-c", program]).done().expect(0);

    assert_eq!(
        ran.text(),
        "True True True True\nTrue C.UTF-8 True 18\n[]\nutf-8 utf-8\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_user_can_be_chosen_by_name_and_number() {
    let id = ["--", "id", "-u"];
    let ids = ["--", "sh", "-c", "id -u; id -g; id -G"];
    assert_eq!(run(["-u", "root"]).args(id).done().expect(0).text(), "0\n");
    assert_eq!(run(["-u", "0:0"]).args(id).done().expect(0).text(), "0\n");
    assert_eq!(
        run(["-u", "4321:1234"]).args(ids).done().expect(0).text(),
        "4321\n1234\n1234\n"
    );
    assert_eq!(
        run(["-u", "nobody:daemon"])
            .args(ids)
            .done()
            .expect(0)
            .text(),
        "65534\n1\n1\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn variables_come_from_the_options_and_from_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vars");
    std::fs::write(&file, "# comment\nFROM_FILE=a b=c\n\nBOTH=file\n").unwrap();

    let ran = run([
        "-e",
        "ONE=1",
        "-e",
        "EMPTY=",
        "-e",
        "BOTH=option",
        "-e",
        "TAKEN",
    ])
    .args(["--env-file".as_ref(), file.as_os_str()])
    .args([
        "--",
        "sh",
        "-c",
        "echo \"$ONE|$EMPTY|$FROM_FILE|$BOTH|$TAKEN|$SECRET\"",
    ])
    .env("TAKEN", "from the host")
    .env("SECRET", "stays")
    .done()
    .expect(0);

    assert_eq!(ran.text(), "1||a b=c|option|from the host|\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_root_is_writable_and_the_image_stays_as_it_was() {
    let write = "echo changed > /etc/hostname && rm /usr/bin/perl && mkdir -p /opt/x && echo y > /opt/x/y && cat /opt/x/y";
    assert_eq!(
        run(["-u", "root", "--", "sh", "-c", write])
            .done()
            .expect(0)
            .text(),
        "y\n"
    );
    run([
        "--",
        "sh",
        "-c",
        "test -x /usr/bin/perl && test ! -e /opt/x",
    ])
    .done()
    .expect(0);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_disk_itself_can_not_be_written_even_by_root() {
    let program = "import os
try:
    fd = os.open('/dev/vda', os.O_RDWR)
    os.pwrite(fd, b'x' * 512, 0); os.fsync(fd)
    print('written')
except OSError as error:
    print(error.errno)";
    let ran = run(["-u", "root", "-c", program]).done().expect(0);
    assert_ne!(ran.text(), "written\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn the_wall_clock_is_the_hosts() {
    let before = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();
    let ran = run(["-c", "import time; print(time.time())"])
        .done()
        .expect(0);
    let after = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs_f64();

    let guest: f64 = ran.text().trim().parse().unwrap();
    assert!(
        before - 0.05 <= guest && guest <= after + 0.05,
        "{before} <= {guest} <= {after}"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_sleep_lasts_as_long_as_it_says() {
    let program = "import time
t, m = time.time(), time.monotonic()
time.sleep(2)
print(1.95 < time.time() - t < 4, 1.95 < time.monotonic() - m < 4)";
    assert_eq!(run(["-c", program]).done().expect(0).text(), "True True\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn randomness_is_seeded_and_differs_between_machines() {
    let program = "import os, uuid
print(os.getrandom(16, os.GRND_NONBLOCK).hex(), uuid.uuid4(), open('/proc/sys/kernel/random/boot_id').read().strip(), open('/etc/machine-id').read().strip())";
    let one = run(["-c", program]).done().expect(0);
    let other = run(["-c", program]).done().expect(0);

    for (one, other) in one
        .text()
        .split_whitespace()
        .zip(other.text().split_whitespace())
    {
        assert_ne!(one, other);
    }
    assert_eq!(one.text().split_whitespace().count(), 4);
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn there_is_a_loopback_and_no_other_network() {
    let program = "import socket, os
print(sorted(os.listdir('/sys/class/net')))
for family, address in [(socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')]:
    server = socket.socket(family); server.bind((address, 0)); server.listen()
    client = socket.create_connection(server.getsockname()[:2], 5)
    server.accept()[0].sendall(b'x'); print(client.recv(1))
print(socket.gethostbyname('localhost'), socket.gethostname() != '', socket.gethostbyname(socket.gethostname()).startswith('127.'))
try: socket.create_connection(('192.0.2.1', 80), 5); print('reached')
except OSError: print('unreachable')";

    let ran = run(["-c", program]).done().expect(0);

    assert_eq!(
        ran.text(),
        "['lo']\nb'x'\nb'x'\n127.0.0.1 True True\nunreachable\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn a_program_can_not_reach_the_host_or_the_agent_over_vsock() {
    let program = "import socket
for cid in (0, 1, 2, 3, 5):
    for port in list(range(0, 20)) + [1024, 5000, 0xfffffffe]:
        s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); s.settimeout(5)
        try:
            s.connect((cid, port))
            try: answer = s.recv(1)
            except OSError: answer = b''
            if answer: print('spoke with', cid, port)
        except OSError: pass
        s.close()
try:
    s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); s.bind((socket.VMADDR_CID_ANY, 5)); print('bound')
except PermissionError: print('ok')";

    assert_eq!(run(["-c", program]).done().expect(0).text(), "ok\n");
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn process_one_reaps_a_thousand_orphans() {
    let program = "import os, time
for i in range(1000):
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0: os._exit(0)
        os._exit(0)
    os.waitpid(pid, 0)
for attempt in range(100):
    zombies = 0
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try: zombies += ') Z' in open(f'/proc/{pid}/stat').read()
        except OSError: pass
    if not zombies: break
    time.sleep(0.1)
print(zombies)";
    assert_eq!(
        run(["--timeout", "120s", "-c", program])
            .done()
            .expect(0)
            .text(),
        "0\n"
    );
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn processors_and_memory_are_as_asked() {
    let program = "import os
total = int(open('/proc/meminfo').readline().split()[1])
print(os.cpu_count(), len(os.sched_getaffinity(0)), total >> 10)";

    for (cpus, memory, floor, ceiling) in [
        ("1", "128M", 80, 128),
        ("2", "512M", 440, 512),
        ("4", "4G", 3900, 4096),
    ] {
        let ran = run(["--cpus", cpus, "--memory", memory, "-c", program])
            .done()
            .expect(0);
        let words: Vec<u64> = ran
            .text()
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let cpus: u64 = cpus.parse().unwrap();
        assert_eq!(words[..2], [cpus; 2]);
        assert!((floor..=ceiling).contains(&words[2]), "{memory}: {words:?}");
    }
}

#[test]
#[ignore = "needs a KVM host: cargo xtask test"]
fn signals_have_their_default_actions_and_no_descriptor_leaks_in() {
    let program = "import os, re
status = open('/proc/self/status').read()
masks = {name: int(re.search(name + r':\\s+(\\w+)', status)[1], 16) for name in ('SigBlk', 'ShdPnd')}
print(masks, len(os.listdir('/proc/self/fd')))
sh = os.popen('grep SigIgn /proc/self/status').read().split()[1]
print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), open('/proc/self/oom_score_adj').read().strip())";
    let ran = run(["-c", program]).done().expect(0);
    assert_eq!(ran.text(), "{'SigBlk': 0, 'ShdPnd': 0} 4\nTrue True 0\n");

    let shell = run(["--", "grep", "SigIgn", "/proc/self/status"])
        .done()
        .expect(0);
    let ignored = shell.text().split_whitespace().nth(1).unwrap();
    // Signals 32 and 33 are the C library's own, which keeps programs from setting them.
    let ignored = u64::from_str_radix(ignored, 16).unwrap() & !(0b11 << 31);
    assert_eq!(ignored, 0);
}
