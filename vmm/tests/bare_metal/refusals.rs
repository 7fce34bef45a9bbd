//! Files that are no snapshot of this machine are refused.
