//! The integration tests of the crate in one binary, because linking one for each file would take most of the time of a
//! test run. A test sets nothing that belongs to the whole process.

mod accumulation;
mod adapters;
mod allocation;
mod average;
mod bdh;
mod bdh_text;
mod class_run;
mod classes;
mod distance;
mod export;
mod fixture;
mod fp8;
mod generate;
mod golden;
mod hub;
mod hub_server;
mod image_table;
mod import;
mod lengths;
mod optimizer_state;
mod packing;
mod passes;
mod rates;
mod resume;
mod small_recipe;
mod small_run;
mod switches;
mod traces;
mod unfused;
mod vision_golden;
mod vision_run;
mod visual_run;
mod vl_folder;
mod vl_generate;
mod vl_golden;
