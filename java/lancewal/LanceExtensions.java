package lancewal;

import java.util.Arrays;
import org.apache.spark.sql.SparkSessionExtensions;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.Function1;
import scala.PartialFunction;
import scala.runtime.AbstractFunction1;
import scala.runtime.AbstractPartialFunction;
import scala.runtime.BoxedUnit;

/** Gives reads of {@code format("lancewal")}, and of views on it, what {@link LanceScanBuilder} can do. */
public final class LanceExtensions extends AbstractFunction1<SparkSessionExtensions, BoxedUnit> {
  @Override
  public BoxedUnit apply(SparkSessionExtensions extensions) {
    extensions.injectOptimizerRule(
        new AbstractFunction1<org.apache.spark.sql.SparkSession, Rule<LogicalPlan>>() {
          @Override
          public Rule<LogicalPlan> apply(org.apache.spark.sql.SparkSession session) {
            return new ReadThroughFront();
          }
        });
    return BoxedUnit.UNIT;
  }

  /** Set it to false and reads of the format are planned without the front. */
  private static final String SWITCH = "spark.sql.lancewal.front";

  private static final class ReadThroughFront extends Rule<LogicalPlan> {
    @Override
    public LogicalPlan apply(LogicalPlan plan) {
      return (LogicalPlan) plan.transformDown(REPLACEMENT);
    }
  }

  private static final PartialFunction<LogicalPlan, LogicalPlan> REPLACEMENT =
      new AbstractPartialFunction<>() {
        @Override
        public boolean isDefinedAt(LogicalPlan plan) {
          return plan instanceof DataSourceV2Relation relation
              && relation.table() instanceof PythonTable
              && relation.table().name().equalsIgnoreCase(PythonCalls.FORMAT)
              && isPlainRead(relation.options());
        }

        @Override
        public <A extends LogicalPlan, B> B applyOrElse(A plan, Function1<A, B> otherwise) {
          if (!isDefinedAt(plan)) {
            return otherwise.apply(plan);
          }
          DataSourceV2Relation relation = (DataSourceV2Relation) plan;
          CaseInsensitiveStringMap options = relation.options();
          PythonCalls.Description described = PythonCalls.loaded((PythonTable) relation.table(), options);
          if (!hasColumns(described.schema(), relation.schema())) {
            return otherwise.apply(plan);
          }
          LanceTable table = new LanceTable(PythonCalls.FORMAT, options.asCaseSensitiveMap(), described);
          @SuppressWarnings("unchecked")
          B replaced =
              (B)
                  relation.copy(
                      table,
                      relation.output(),
                      relation.catalog(),
                      relation.identifier(),
                      relation.options(),
                      relation.timeTravelSpec());
          return replaced;
        }
      };

  /**
   * Whether a table shows columns as {@code wanted} has them. A schema of the user's own ({@code
   * spark.read.schema}) may have other types, into which Python converts; the front would show the bytes of one
   * type as another.
   */
  private static boolean hasColumns(StructType table, StructType wanted) {
    return Arrays.stream(wanted.fields())
        .allMatch(
            field ->
                Arrays.stream(table.fields())
                    .anyMatch(
                        column ->
                            column.name().equals(field.name()) && column.dataType().equals(field.dataType())));
  }

  /** Jobs and the change feed are sources of their own kind, and who asked for filterPushdown has it. */
  private static boolean isPlainRead(CaseInsensitiveStringMap options) {
    return SQLConf.get().getConfString(SWITCH, "true").equals("true")
        && !isTrue(options, "filterPushdown")
        && isMergedRead(options);
  }

  /** Whether the rows of a table are read, and not its change feed or the report of a job. */
  static boolean isMergedRead(CaseInsensitiveStringMap options) {
    return !isTrue(options, "readChangeFeed") && !options.containsKey("job");
  }

  /** Any other word is for lancewal to refuse. */
  private static boolean isTrue(CaseInsensitiveStringMap options, String name) {
    return "true".equalsIgnoreCase(options.get(name));
  }
}
