//! Forks whose imports take long and are done: they print from numpy, and draw from it what no other has.

use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sandvmm::Sandbox;
use sandvmm_tests::{HUNG_AFTER, children_of};

use crate::template::{PRIVATE_KIB_MAX, private_kib, python};
use crate::{Test, text};

pub(crate) const TESTS: &[Test] = &[(
    "forks_with_numpy_print_soon_have_no_draw_alike_and_little_memory_of_their_own",
    forks,
)];

/// How many forks are made, unless [`FORKS_VARIABLE`] says otherwise: an emulated processor does not bear a hundred at each run of the tests.
const FORKS: usize = 4;
/// The variable.
const FORKS_VARIABLE: &str = "SANDVMM_NUMPY_FORKS";
/// How many of them live at once.
const AT_ONCE: usize = 4;

/// What the interpreter has imported and drawn before it was saved: numpy's global generator keeps its state in C.
const WARM: &str = "import numpy\nnumpy.random.random(), numpy.random.default_rng().random()";

/// What each fork prints: something computed, and what the generators draw.
const TOLD: &str = "import numpy\nprint(int(numpy.arange(1000).sum()), numpy.random.random(), numpy.random.default_rng().random())";

/// Memory of each machine in MiB.
const MEMORY_MIB: u32 = 256;

/// How many times faster a fork prints than the import took, at least.
const TIMES_FASTER: u32 = 4;

fn forks() {
    let forks = std::env::var(FORKS_VARIABLE).map_or(FORKS, |text| text.parse().unwrap());
    let image = PathBuf::from(std::env::var_os("SANDVMM_TEST_ROOTFS").unwrap());
    let builder = Sandbox::builder().rootfs(image).memory_mib(MEMORY_MIB);
    let parent = builder.timeout(Some(HUNG_AFTER * 10)).start().unwrap();
    let begun = Instant::now();
    let warmed = parent.warm_up(WARM).output().unwrap();
    assert!(warmed.completion.outcome.success(), "{warmed:?}");
    let import = begun.elapsed();
    let processes = || BTreeSet::from_iter(children_of(std::process::id()));
    let before = processes();

    let mut took: Vec<Duration> = Vec::new();
    let mut private: Vec<u64> = Vec::new();
    let mut drawn = HashSet::new();
    while took.len() < forks {
        let living = parent.fork(AT_ONCE.min(forks - took.len())).unwrap();
        for fork in &living {
            let begun = Instant::now();
            let output = python(fork, TOLD).output().unwrap();
            took.push(begun.elapsed());
            assert!(output.completion.warm, "{output:?}");
            let told = text(&output);
            let mut words = told.split_whitespace();
            assert_eq!(words.next(), Some("499500"), "{output:?}");
            drawn.extend(words.map(str::to_owned));
        }
        private.extend((&processes() - &before).into_iter().map(private_kib));
        assert_eq!(private.len(), took.len());
    }

    took.sort_unstable();
    private.sort_unstable();
    let (middle, last) = (forks / 2, forks - 1);
    eprintln!(
        "import {import:?}; {forks} forks printed after p50 {:?}, at most {:?}; private memory p50 {} KiB, at most {} KiB",
        took[middle], took[last], private[middle], private[last]
    );
    assert_eq!(drawn.len(), 2 * forks, "{drawn:?}");
    assert!(took[middle] * TIMES_FASTER < import, "{took:?}, {import:?}");
    assert!(private[last] < PRIVATE_KIB_MAX, "{private:?}");
}
