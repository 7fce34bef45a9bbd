//! What a program of tests says of each test, in the words of Rust's own test harness.

use std::collections::BTreeMap;

/// The end of one test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It passed.
    Passed,
    /// It failed.
    Failed,
    /// It was not run.
    Ignored,
}

/// By the tests' names.
pub(super) type Verdicts = BTreeMap<String, Verdict>;

/// All verdicts in `output`. A test that had begun only has none.
pub(super) fn in_output(output: &str) -> Verdicts {
    output.lines().filter_map(in_line).collect()
}

/// The names of the tests that failed.
pub(super) fn failed(verdicts: &Verdicts) -> Vec<String> {
    verdicts
        .iter()
        .filter(|(_, verdict)| **verdict == Verdict::Failed)
        .map(|(name, _)| name.clone())
        .collect()
}

/// `test NAME ... ok`, in which the harness may pad the name and give a reason at the end.
fn in_line(line: &str) -> Option<(String, Verdict)> {
    let (name, word) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    let verdict = match word.trim_end() {
        "ok" => Verdict::Passed,
        word if word.starts_with("FAILED") => Verdict::Failed,
        word if word.starts_with("ignored") => Verdict::Ignored,
        _ => return None,
    };
    Some((name.trim_end().to_owned(), verdict))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_is_understood_and_other_lines_are_not() {
        let output = "\nrunning 4 tests\ntest a::b ... ok\ntest c      ... FAILED\ntest d ... ignored, needs a KVM host\n\
                      test e has been running for over 60 seconds\ntest result: ok. 1 passed\ntest f ... \n";

        let verdicts = in_output(output);

        let expected = [
            ("a::b", Verdict::Passed),
            ("c", Verdict::Failed),
            ("d", Verdict::Ignored),
        ];
        assert_eq!(
            verdicts,
            expected
                .map(|(name, verdict)| (name.to_owned(), verdict))
                .into()
        );
    }
}
