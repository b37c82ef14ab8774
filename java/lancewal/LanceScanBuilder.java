package lancewal;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Collects what a query needs; the tasks in Python read that and no more. */
final class LanceScanBuilder
    implements SupportsPushDownRequiredColumns,
        SupportsPushDownV2Filters,
        SupportsPushDownLimit,
        SupportsPushDownAggregates {
  /** Set it to false and nothing is read while a query is planned. */
  private static final String ANSWERS = "spark.sql.lancewal.answers";

  private final PythonCalls.Description table;
  private final CaseInsensitiveStringMap options;
  private final List<Predicate> pushed = new ArrayList<>();
  private final ArrayNode conditions = PythonCalls.JSON.createArrayNode();
  private StructType wanted;
  private Integer limit;
  private boolean counts;
  /** A count that was planned to find out who counts. */
  private LanceScan counting;

  LanceScanBuilder(PythonCalls.Description table, CaseInsensitiveStringMap options) {
    this.table = table;
    this.options = options;
    this.wanted = table.schema();
  }

  /** Whole columns, in the table's order. With none wanted, the smallest one tells how many rows there are. */
  @Override
  public void pruneColumns(StructType required) {
    StructField[] all = table.schema().fields();
    List<String> names = Arrays.asList(required.fieldNames());
    for (StructField field : required.fields()) {
      if (Arrays.stream(all).noneMatch(each -> shows(each, field))) {
        throw new UnsupportedOperationException(
            "with the options of this query the table has no column "
                + field.name()
                + " of type "
                + field.dataType().simpleString()
                + "; name columns in the query, and no others in its options");
      }
    }
    StructField[] kept =
        Arrays.stream(all).filter(field -> names.contains(field.name())).toArray(StructField[]::new);
    if (kept.length == 0 && all.length > 0) {
      kept =
          new StructField[] {
            Arrays.stream(all).min(Comparator.comparingInt(LanceScanBuilder::size)).get()
          };
    }
    wanted = new StructType(kept);
  }

  /** Whether {@code column} is the one that is wanted, of which Spark may want fewer nested fields. */
  private static boolean shows(StructField column, StructField wanted) {
    return column.name().equals(wanted.name()) && shows(column.dataType(), wanted.dataType());
  }

  private static boolean shows(DataType type, DataType wanted) {
    if (type instanceof StructType fields && wanted instanceof StructType some) {
      return Arrays.stream(some.fields())
          .allMatch(each -> Arrays.stream(fields.fields()).anyMatch(field -> shows(field, each)));
    }
    if (type instanceof ArrayType list && wanted instanceof ArrayType other) {
      return shows(list.elementType(), other.elementType());
    }
    if (type instanceof MapType map && wanted instanceof MapType other) {
      return shows(map.keyType(), other.keyType()) && shows(map.valueType(), other.valueType());
    }
    return type.equals(wanted);
  }

  private static boolean hasFields(DataType type) {
    return type instanceof StructType
        || type instanceof MapType
        || type instanceof ArrayType list && hasFields(list.elementType());
  }

  private static int size(StructField field) {
    boolean nested = field.dataType() instanceof ArrayType || hasFields(field.dataType());
    return field.dataType().defaultSize() + (nested ? 1 << 20 : 0);
  }

  /** Spark evaluates all of them again: what the table leaves out is only what surely does not match. */
  @Override
  public Predicate[] pushPredicates(Predicate[] predicates) {
    for (Predicate each : predicates) {
      ObjectNode condition = Conditions.of(each);
      if (condition != null) {
        pushed.add(each);
        conditions.add(condition);
      }
    }
    return predicates;
  }

  @Override
  public Predicate[] pushedPredicates() {
    return pushed.toArray(Predicate[]::new);
  }

  /** Each task stops after so many rows, and Spark takes as many of all of them. */
  @Override
  public boolean pushLimit(int most) {
    limit = most;
    return true;
  }

  /** Whether all rows are counted here; else they are counted part by part, and Spark adds the parts up. */
  @Override
  public boolean supportCompletePushDown(Aggregation aggregation) {
    if (!pushAggregation(aggregation)) {
      return false;
    }
    counting = scan();
    return counting.answer() != null;
  }

  @Override
  public boolean pushAggregation(Aggregation aggregation) {
    counts =
        aggregation.groupByExpressions().length == 0
            && aggregation.aggregateExpressions().length > 0
            && Arrays.stream(aggregation.aggregateExpressions()).allMatch(CountStar.class::isInstance);
    if (counts) {
      StructType columns = new StructType();
      for (int i = 0; i < aggregation.aggregateExpressions().length; i++) {
        columns = columns.add("count_" + i, DataTypes.LongType, false);
      }
      wanted = columns;
    }
    return counts;
  }

  @Override
  public Scan build() {
    LanceScan scan = counts && counting != null ? counting : scan();
    Scan answer = scan.answer();
    return answer != null ? answer : scan;
  }

  private LanceScan scan() {
    ObjectNode request = PythonCalls.JSON.createObjectNode();
    request.set("conditions", conditions);
    if (limit != null) {
      request.put("limit", limit);
    }
    if (counts) {
      request.put("count", true);
    }
    if (SQLConf.get().getConfString(ANSWERS, "true").equals("true")) {
      request.put("answer", true);
    }
    return new LanceScan(table, options, wanted, request, limit != null);
  }
}
