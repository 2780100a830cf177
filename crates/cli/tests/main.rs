//! The integration tests of the program, in one binary because linking one per file would take most of the time of a test run. Each
//! test runs the program in its own processes.

mod ablate;
mod bad_input;
mod classes;
mod contracts;
mod corrupt_checkpoints;
mod cuda;
mod data;
mod disk;
mod examples;
#[path = "../../data/src/remote/exchange.rs"]
mod exchange;
mod exports;
mod fixture;
#[path = "../../train/tests/fovea_folder/mod.rs"]
mod fovea_folder;
mod habits;
#[path = "../../train/tests/hub_server/mod.rs"]
mod hub_server;
mod images;
mod kept_runs;
mod kill;
mod kill_rank;
mod lengths;
mod models;
mod output;
mod pictures;
mod preference;
mod profile;
mod program;
mod projects;
mod ranks;
mod ranks_measure;
mod ranks_text;
mod ranks_train;
mod requeue;
mod reshard;
mod runs;
mod serve;
#[path = "../../data/src/remote/server.rs"]
mod set_server;
mod stop;
mod stream;
mod sweep;
#[path = "../../train/tests/tar/mod.rs"]
mod tar;
mod threads;
mod track;
mod tune;
mod vision_cache;
#[path = "../../train/tests/vl_folder/mod.rs"]
mod vl_folder;
mod watch;
