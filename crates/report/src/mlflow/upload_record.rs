//! Records in the run's folder of how much of the run each server and experiment has received.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

use flatout_data::durable;
use serde::{Deserialize, Serialize};

/// The file in a run's folder that has the records.
const FILE: &str = "mlflow.json";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UploadRecord {
    pub server: String,
    pub experiment: String,
    /// The key of the run on the server, chosen before the run is created.
    pub key: String,
    /// The server's id of the run.
    pub run_id: Option<String>,
    pub has_parameters: bool,
    /// Bytes of the log that were sent, and the time of the last line in them.
    pub offset: u64,
    pub time: f64,
}

impl UploadRecord {
    /// The record of an experiment on a server; an empty one where there is none.
    pub fn of(run: &Path, server: &str, experiment: &str) -> UploadRecord {
        let fresh =
            UploadRecord { server: plain(server), experiment: experiment.into(), ..UploadRecord::default() };
        all(run).into_iter().find(|kept| kept.is_of(&fresh)).unwrap_or(fresh)
    }

    /// Writes the record to the file, next to those of other servers and experiments.
    pub fn keep(&self, run: &Path) -> io::Result<()> {
        let mut kept = all(run);
        match kept.iter_mut().find(|kept| kept.is_of(self)) {
            Some(known) => *known = self.clone(),
            None => kept.push(self.clone()),
        }
        let text = serde_json::to_vec_pretty(&kept).expect("it has a JSON form");
        durable::replace(&run.join(FILE), &text)
            .map_err(|error| io::Error::other(format!("{FILE} cannot be written ({error})")))
    }

    /// The number of lines of the run's log that were not sent.
    pub fn lines_left(&self, run: &Path) -> usize {
        let log = File::open(run.join("events.jsonl"))
            .and_then(|mut log| log.seek(SeekFrom::Start(self.offset)).map(|_| log));
        log.map_or(0, |log| BufReader::new(log).split(b'\n').map_while(Result::ok).count())
    }

    fn is_of(&self, other: &UploadRecord) -> bool {
        (&self.server, &self.experiment) == (&other.server, &other.experiment)
    }
}

/// The records of a run's folder. Earlier versions kept a single one.
fn all(run: &Path) -> Vec<UploadRecord> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Records {
        Several(Vec<UploadRecord>),
        One(UploadRecord),
    }
    let text = fs::read(run.join(FILE)).unwrap_or_default();
    let kept = match serde_json::from_slice(&text) {
        Ok(Records::Several(all)) => all,
        Ok(Records::One(one)) => vec![one],
        Err(_) => vec![],
    };
    kept.into_iter().map(|kept| UploadRecord { server: plain(&kept.server), ..kept }).collect()
}

/// An address in the form in which addresses are compared.
fn plain(server: &str) -> String {
    server.trim_end_matches('/').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_and_experiment_has_a_record() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        let offset_of = |server: &str, experiment: &str| UploadRecord::of(run, server, experiment).offset;
        let keep = |server: &str, experiment: &str, offset: u64| {
            UploadRecord { offset, ..UploadRecord::of(run, server, experiment) }.keep(run).unwrap();
        };
        assert_eq!(offset_of("http://a", "x"), 0);
        keep("http://a", "x", 3);
        keep("http://b/", "x", 5);
        keep("http://a", "y", 7);
        keep("http://a/", "x", 4);
        assert_eq!(
            [offset_of("http://a", "x"), offset_of("http://b", "x"), offset_of("http://a//", "y")],
            [4, 5, 7]
        );
        assert_eq!((all(run).len(), offset_of("http://b", "y")), (3, 0));

        std::fs::write(run.join("events.jsonl"), "one\ntwo\nthree\n").unwrap();
        let left = |server: &str| UploadRecord::of(run, server, "x").lines_left(run);
        assert_eq!([left("http://a"), left("http://elsewhere")], [2, 3]);

        // The format of earlier versions, with a single record.
        let one = UploadRecord {
            server: "http://a/".into(),
            experiment: "x".into(),
            offset: 9,
            ..UploadRecord::default()
        };
        std::fs::write(run.join(FILE), serde_json::to_vec(&one).unwrap()).unwrap();
        assert_eq!((offset_of("http://a", "x"), offset_of("http://b", "x")), (9, 0));
    }
}
