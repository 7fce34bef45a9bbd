//! The device against a driver that plays by the rules or breaks them, over rings in memory, real socket pairs and a real event loop.

mod arithmetic;
mod guest;
mod hostile;
mod limits;
mod model;
mod streams;
mod wakeups;
