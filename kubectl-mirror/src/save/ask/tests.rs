//! Tests of the evaluation of the answers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

fn there(why: &'static str) -> Result<Option<u8>, Failure> {
    Err(Failure::There(anyhow!(why)))
}

/// The answers of the nodes a, b, and so on; or the error.
async fn taken(of_nodes: Vec<Result<Option<u8>, Failure>>) -> anyhow::Result<Answers<u8>> {
    let mut answers = Answers::default();
    let named = ('a'..).map(String::from).zip(of_nodes);
    answers.take_all(stream::iter(named)).await?;
    answers.are_some().map(|()| answers)
}

#[tokio::test]
async fn a_node_that_fails_is_missing_and_costs_no_packet_of_the_others() {
    let answers = taken(vec![Ok(Some(7)), there("gone"), Ok(None), there("gone")]).await.unwrap();
    assert_eq!(answers.files, [("a".to_owned(), 7)]);
    assert_eq!(answers.silent, [("gone".to_owned(), vec!["b".to_owned(), "d".to_owned()])].into());
    assert_eq!(answers.missing().unwrap(), "2 of 4 nodes are missing");
    assert_eq!(taken(vec![Ok(Some(7)), Ok(None)]).await.unwrap().missing(), None);
}

/// The packets of the other nodes are incomplete, so they must not replace a complete file.
#[tokio::test]
async fn a_full_disk_is_the_end() {
    let full = || Err(Failure::Here(anyhow!("no space left")));
    let error = taken(vec![Ok(Some(7)), full(), Ok(Some(8))]).await.unwrap_err();
    assert_eq!(error.to_string(), "no space left");
}

#[tokio::test]
async fn a_node_without_a_recorder_has_lost_nothing() {
    let mut answers = Answers::<u8>::default();
    answers.lacks("a", &Lack::NoRecorder("no recorder is switched on there".to_owned()));
    let why = answers.are_some().unwrap_err().to_string();
    assert!(why.contains("recorder.enabled"), "{why}");
    answers.take_all(stream::iter([("b".to_owned(), Ok(None))])).await.unwrap();
    answers.are_some().unwrap();
    assert_eq!(answers.missing(), None);
    answers.lacks("c", &Lack::Silent("the recorder does not run there".to_owned()));
    assert_eq!(answers.missing().unwrap(), "1 of 2 nodes are missing");
}

#[tokio::test]
async fn the_switch_of_the_recorders_is_no_advice_where_they_are_on() {
    let error = taken(vec![there("gone"), there("broken")]).await.unwrap_err();
    assert_eq!(error.to_string(), "no recorder has answered");
}

#[test]
fn a_command_that_fails_leads_to_the_log_of_the_recorder() {
    let why = |stderr: &str, code| {
        failed(&Ended { stdout: Vec::new(), stderr: stderr.into(), code }, "podmirror-x", "security")
    };
    let log = "`kubectl -n security logs podmirror-x -c recorder`";
    let waits = "mirror-agent: no recorder of target live runs on this node; `mirror-agent recorder --target live` is one\n";
    assert_eq!(why(waits, 1), format!("the recorder waits for its agent: {log}"));
    let short = "mirror-agent: the recorder has sent 7 of 9 bytes; its log says why";
    assert_eq!(why(short, 1), format!("{short} ({log})"));
    assert_eq!(why("", 137), format!("its exit code is 137, and it does not say why ({log})"));
}

#[test]
fn a_recorder_that_prints_nothing_may_be_read_by_another_save() {
    let silent = if_another_reads(anyhow!("deadline has elapsed").context(Stopped::Silent)).to_string();
    assert!(silent.starts_with("it prints nothing for 60 s"), "{silent}");
    assert!(silent.ends_with("another `save` may be reading from it: try again"), "{silent}");
    assert_eq!(if_another_reads(anyhow!("gone")).to_string(), "gone");
}
