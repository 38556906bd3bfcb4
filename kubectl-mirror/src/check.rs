//! `kubectl mirror check`: checks whether podmirror can work on a cluster, and whether an installed podmirror works.
//!
//! [`read`] asks the API server. [`judge`] turns the answers into findings, and is pure. The exit code is 1 if a
//! finding is a failure. Nothing is changed. The agent's own commands on a node can check more: docs/kubectl-mirror.md
//! lists what this command cannot see.

mod judge;
mod network;
mod read;

use std::process::ExitCode;

use mirror_core::status::{columns, printable};
use serde::Serialize;

use self::judge::{Finding, Level};
use crate::{cluster::Cluster, print, screen};

/// Prints the findings. Returns 1 if one is a failure.
pub(crate) async fn check(output: Option<screen::Output>, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    let report = Report::read(cluster).await;
    print(&output.map_or_else(|| Ok(report.table()), |output| screen::object(&report, &output))?)?;
    Ok(report.exit_code())
}

/// The findings as a table.
pub(crate) async fn table(cluster: &Cluster) -> String {
    Report::read(cluster).await.table()
}

/// The output.
#[derive(Debug, PartialEq, Serialize)]
struct Report {
    /// The worst level of the findings.
    result: Level,
    findings: Vec<Finding>,
}

impl Report {
    async fn read(cluster: &Cluster) -> Self {
        let facts = read::facts(cluster).await;
        Self::of(facts.map_or_else(|why| vec![judge::unreachable(&why)], |of| judge::findings(&of)))
    }

    fn of(findings: Vec<Finding>) -> Self {
        let result = findings.iter().map(|finding| finding.result).max().unwrap_or(Level::Ok);
        Self { result, findings }
    }

    fn exit_code(&self) -> ExitCode {
        ExitCode::from(u8::from(self.result == Level::Fail))
    }

    /// A line for each finding, followed by its remedy.
    fn table(&self) -> String {
        let mut rows = vec![["CHECK", "RESULT", "FOUND"].map(str::to_owned).to_vec()];
        let name = |level: Level| format!("{level:?}").to_uppercase();
        let row = |of: &Finding| vec![of.check.to_owned(), name(of.result), of.found.clone()];
        rows.extend(self.findings.iter().map(row));
        let todo = self.findings.iter().map(|finding| finding.todo.as_str());
        let line = |(line, todo): (&str, &str)| match todo {
            "" => format!("{line}\n"),
            todo => format!("{line}\n  -> {}\n", printable(todo)),
        };
        columns(&rows).lines().zip([""].into_iter().chain(todo)).map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::json;

    use super::*;

    #[test]
    fn the_worst_finding_is_the_result_and_each_has_its_remedy_below() {
        let ok = Finding::ok("server", "1.34.1".to_owned());
        let warn = Finding::warn("kernel", "a: 5.15".to_owned(), "use a newer\none");
        let fail = Finding::fail("agents", "none is ready".to_owned(), "look at them");
        let report = Report::of(vec![ok.clone(), warn.clone()]);
        assert_eq!((report.result, report.exit_code()), (Level::Warn, ExitCode::SUCCESS));
        assert_eq!(
            report.table(),
            "CHECK   RESULT  FOUND\n\
             server  OK      1.34.1\n\
             kernel  WARN    a: 5.15\n\
             \x20 -> use a newer\\none\n"
        );
        let report = Report::of(vec![fail, warn, ok.clone()]);
        assert_eq!(report.exit_code(), ExitCode::FAILURE);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!((&json["result"], &json["findings"][2]["result"]), (&json!("FAIL"), &json!("OK")));
        assert_eq!(Report::of(vec![ok]).exit_code(), ExitCode::SUCCESS);
    }
}
