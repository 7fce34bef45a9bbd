pub(crate) fn make(_only: Option<usize>) {}
