//! Starts a machine's process and closes its cell.
