//! End-to-end and whole-model tests, one binary so that a release build links once.

mod checkpoint;
mod common;

mod bench;
mod demo;
mod golden;
mod hostile;
mod inspect;
mod odd_shapes;
mod pack;
mod parity;
mod ptq;
mod q4;
mod reference;
mod run;
mod synth;
